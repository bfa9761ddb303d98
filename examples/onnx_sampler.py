"""Sample images from a file of `mvm onnx` with numpy and onnxruntime alone: no torch, no mvm.

    mvm onnx digits --out digits.onnx
    python examples/onnx_sampler.py digits.onnx --classes 3,7 --seed 0 --num 8 --out digits.npy

Image i has seed SEED + i and is the one that `mvm sample` makes with that seed, up to rounding.
"""

import argparse
import json
import math

import numpy as np
import onnxruntime

MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
INITIAL, STEP = 0, 1 << 16  # streams of mvm.noise: the starting noise, and that of step i at STEP + i


def philox(counter, key):
    """Return the four 32-bit words of Philox4x32-10 (Salmon et al. 2011), in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & MASK, (a >> HALF) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    return c0, c1, c2, c3


def normal(seeds, stream, shape):
    """Return the standard normals (B, *shape) of these seeds, float32 (Box-Muller)."""
    count = math.prod(shape)
    block = np.arange((count + 3) // 4, dtype=np.uint64)[None]
    zero = np.zeros_like(block)
    key = np.array(seeds, dtype=np.uint64)[:, None]
    words = np.stack(philox((block, zero + np.uint64(stream), zero, zero), (key & MASK, key >> HALF)), -1)
    u = (words.reshape(len(seeds), -1)[:, : count + count % 2].astype(np.float64) + 0.5) * 2.0**-32
    radius, angle = np.sqrt(-2 * np.log(u[:, 0::2])), 2 * np.pi * u[:, 1::2]
    z = np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).reshape(len(seeds), -1)[:, :count]
    return z.astype(np.float32).reshape(-1, *shape)


def x0_hat(session, x, step, labels, tables):
    """Return the network's x0_hat at a step, guided where the step says so."""
    own = x * np.float32(step["scale"])
    level = np.full(len(x), step["level"], dtype=np.float32)

    def predicted(label):
        return session.run(None, {"x": own, "level": level, "label": label})[0]

    null = np.full_like(labels, tables["null"])
    prediction = predicted(labels if tables["conditional"] else null)
    if step["guided"]:
        weak = predicted(null)
        prediction = weak + np.float32(tables["cfg"]) * (prediction - weak)
    return np.float32(step["from_x"]) * own + np.float32(step["from_prediction"]) * prediction


def combine(decay, x, weights, x0s, kick):
    """Return decay x + sum(weights * x0s) + kick."""
    return np.float32(decay) * x + sum(np.float32(w) * x0 for w, x0 in zip(weights, x0s, strict=False)) + kick


def sample(session, tables, labels, seeds):
    """Return images before rounding, float32 (B, C, H, W): predict, evaluate once, correct with the same noise."""
    x = normal(seeds, INITIAL, tables["shape"]) * np.float32(tables["first"])
    history, before, anchor, kick = [], None, x, np.float32(0)
    for index, step in enumerate(tables["steps"]):
        history.insert(0, x0_hat(session, x, step, labels, tables))
        if before is not None and before["correct"]:
            x = combine(before["decay"], anchor, before["correct"], history, kick)
        noisy = step["std"] > 0
        kick = np.float32(step["std"]) * normal(seeds, STEP + index, tables["shape"]) if noisy else np.float32(0)
        before, anchor = step, x
        x = combine(step["decay"], x, step["predict"], history, kick)
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file of `mvm onnx`")
    parser.add_argument("--classes", default="", help="class numbers to go round, e.g. 3,7; all when empty")
    parser.add_argument("--num", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="samples.npy", help="uint8 (N, H, W, C)")
    options = parser.parse_args()
    session = onnxruntime.InferenceSession(options.model, providers=onnxruntime.get_available_providers())
    tables = json.loads(session.get_modelmeta().custom_metadata_map["mvm"])
    if tables["codec"] != "pixels":
        parser.error(f"{options.model} makes latents of '{tables['codec']}', which need its decoder")
    classes = [int(part) for part in options.classes.split(",") if part] or list(range(len(tables["classes"])))
    if not all(0 <= label < len(tables["classes"]) for label in classes):
        parser.error(f"--classes {options.classes}: this model has classes 0 to {len(tables['classes']) - 1}")
    labels = np.array([classes[i % len(classes)] for i in range(options.num)], dtype=np.int64)
    x = sample(session, tables, labels, [options.seed + i for i in range(options.num)])
    images = ((x + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    np.save(options.out, images.transpose(0, 2, 3, 1))
    print(f"wrote {options.num} images to {options.out}")


if __name__ == "__main__":
    main()
