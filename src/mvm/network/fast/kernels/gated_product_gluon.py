"""The kernel of gated_product, in Gluon, which says what every warp of a Hopper GPU does.

A program takes 128 rows of x, passes all weights by them, and goes on to its next 128. Its warps have roles: one
brings tiles from memory into a ring in shared memory, two groups of four multiply, each 64 rows by the gate's and the
up columns of a tile at once. A group's silu and store thus run while the other group multiplies and the next tiles
arrive, and gate and up end in one thread's registers: what cuBLAS writes for another kernel to read never leaves them.

Every slot of shared memory has two barriers. full: its bytes have arrived, the groups may read; empty: both groups
have read it, it may be filled again. A barrier's phase flips each time, so that a turn waits for the parity of its own.
"""

from triton.experimental import gluon  # ty: ignore[import-not-found]
from triton.experimental.gluon import language as gl  # ty: ignore[import-not-found]
from triton.experimental.gluon.language.nvidia.hopper import (  # ty: ignore[import-not-found]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mvm.network.fast.kernels.gated_product import BLOCK, DEPTH

ROWS = gl.constexpr(BLOCK // 2)  # of a group
COLUMNS = gl.constexpr(128)  # of the gate in a tile, and as many of up
STEP = gl.constexpr(DEPTH)  # along K
REGISTERS = gl.constexpr([232, 40])  # of a thread of the second group, and of the warp that brings: it needs few
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def bring(
    x, weight, x_s, w_s, x_full, x_empty, w_full, w_empty, rows, hidden,
    K: gl.constexpr, STAGES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Fill the ring of weights, and x: once for a block of rows (KEEP), or along with the weights."""
    STEPS: gl.constexpr = K // STEP
    X_BYTES: gl.constexpr = 2 * ROWS * STEP * 2
    W_BYTES: gl.constexpr = 2 * COLUMNS * STEP * 2
    tiles = gl.cdiv(hidden, COLUMNS)
    turn = 0
    x_phase = 1
    for block in range(gl.program_id(0), gl.cdiv(rows, 2 * ROWS), gl.num_programs(0)):
        first = block * (2 * ROWS)
        for n in range(tiles):
            for k in range(STEPS):
                if KEEP:  # noqa: SIM102 (alone, it is decided when the kernel is compiled)
                    if n == 0:
                        bar = x_full.index(k)
                        mbarrier.wait(x_empty.index(k), x_phase)
                        mbarrier.expect(bar, X_BYTES)
                        tma.async_copy_global_to_shared(x, [first, k * STEP], bar, x_s.index(k))
                        tma.async_copy_global_to_shared(x, [first + ROWS, k * STEP], bar, x_s.index(STEPS + k))
                stage = turn % STAGES
                bar = w_full.index(stage)
                mbarrier.wait(w_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                if KEEP:
                    mbarrier.expect(bar, W_BYTES)
                else:
                    mbarrier.expect(bar, W_BYTES + X_BYTES)
                    tma.async_copy_global_to_shared(x, [first, k * STEP], bar, x_s.index(stage))
                    tma.async_copy_global_to_shared(x, [first + ROWS, k * STEP], bar, x_s.index(STAGES + stage))
                tma.async_copy_global_to_shared(weight, [n * COLUMNS, k * STEP], bar, w_s.index(2 * stage))
                tma.async_copy_global_to_shared(weight, [hidden + n * COLUMNS, k * STEP], bar, w_s.index(2 * stage + 1))
                turn += 1
        x_phase ^= 1


@gluon.jit
def reciprocal(x):
    """Return 1 / x by the GPU's own instruction, within one unit in the last place: a division is several more."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def multiply(
    GROUP: gl.constexpr, out, bias, x_s, both_s, o_s, x_full, x_empty, w_full, w_empty, rows, hidden,
    K: gl.constexpr, STAGES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Compute a group's rows of every block, tile after tile. A slot is given back when the next product is on."""
    STEPS: gl.constexpr = K // STEP
    FIRST: gl.constexpr = GROUP * (STEPS if KEEP else STAGES)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    tiles = gl.cdiv(hidden, COLUMNS)
    turn = 0
    x_phase = 0
    mine = o_s.index(GROUP)
    for block in range(gl.program_id(0), gl.cdiv(rows, 2 * ROWS), gl.num_programs(0)):
        for n in range(tiles):
            last = n == tiles - 1
            both = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, MMA)
            for k in range(STEPS):
                stage = turn % STAGES
                if KEEP:
                    mbarrier.wait(x_full.index(k), x_phase)
                    a = x_s.index(FIRST + k)
                else:
                    a = x_s.index(FIRST + stage)
                mbarrier.wait(w_full.index(stage), (turn // STAGES) & 1)
                both = warpgroup_mma(a, both_s.index(stage).permute((1, 0)), both, use_acc=k > 0, is_async=True)
                both = warpgroup_mma_wait(1, deps=(both,))
                mbarrier.arrive(w_empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k > 0)
                if KEEP:
                    mbarrier.arrive(x_empty.index((k + STEPS - 1) % STEPS), count=1, pred=(k > 0) & last)
                turn += 1
            both = warpgroup_mma_wait(0, deps=(both,))
            mbarrier.arrive(w_empty.index((turn + STAGES - 1) % STAGES), count=1)
            if KEEP:
                mbarrier.arrive(x_empty.index(STEPS - 1), count=1, pred=last)
            gate, up = both.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
            LAYOUT: gl.constexpr = gate.type.layout
            column = n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            gate += gl.load(bias + column, column < hidden, 0.0).to(gl.float32).expand_dims(0)
            up += gl.load(bias + hidden + column, column < hidden, 0.0).to(gl.float32).expand_dims(0)
            value = gate * up * reciprocal(1.0 + gl.exp2(-LOG2_E * gate))
            tma.store_wait(0)
            mine.store(value.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [block * (2 * ROWS) + GROUP * ROWS, n * COLUMNS], mine)
        x_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def gated_product_kernel(
    x, weight, out, bias, rows, hidden, K: gl.constexpr, STAGES: gl.constexpr, KEEP: gl.constexpr
):  # fmt: skip
    SLOTS: gl.constexpr = K // STEP if KEEP else STAGES
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, ROWS, STEP], x.layout)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, COLUMNS, STEP], weight.layout)
    both_s = w_s._reinterpret(gl.bfloat16, [STAGES, 2 * COLUMNS, STEP], weight.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], out.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    x_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(SLOTS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (gl.constexpr(0), out, bias, x_s, both_s, o_s, x_full, x_empty, w_full, w_empty,
                        rows, hidden, K, STAGES, KEEP)),
            (multiply, (gl.constexpr(1), out, bias, x_s, both_s, o_s, x_full, x_empty, w_full, w_empty,
                        rows, hidden, K, STAGES, KEEP)),
            (bring, (x, weight, x_s, w_s, x_full, x_empty, w_full, w_empty, rows, hidden, K, STAGES, KEEP)),
        ],
        [4, 1],
        REGISTERS,
    )
    # fmt: on


# Of a tile of x, of a weight, and of the output: rows, columns, and how they lie in shared memory.
TILES = tuple(
    (shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))
    for shape in ([ROWS.value, STEP.value], [COLUMNS.value, STEP.value], [ROWS.value, COLUMNS.value])
)
