"""What makes networks fast: GPU kernels, products of 8 bits. The architecture is in the files above."""
