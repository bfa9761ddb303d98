"""Many processes: torchrun, shares of a batch, tensors that are sharded over them."""
