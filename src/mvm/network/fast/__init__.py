"""What makes networks fast, from outside: network/*.py show the architecture in plain torch and know none of it.

Each part swaps modules of a network for subclasses that compute the same by other means, under the same state dict:

    gpu.apply(network, kernels=..., fp8=...)  # Triton kernels, products in float8, a fused residual stream; training
    gpu.apply(network, kernels=..., sampling=True)
    cpu.apply(network), int8.apply(network)   # sampling in float32: fewer passes over memory, products in int8
    recompute.apply(network)                  # activation checkpointing that keeps products
    recompute.inside(network)                 # the same for blocks that are compiled one by one

`swap.plain(network)` undoes all of them.
"""
