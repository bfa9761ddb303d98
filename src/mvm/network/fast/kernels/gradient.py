"""The gradient of an operator that has one kernel each way."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def backward_by(operator: Any, backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Give operator(values, parameter) the gradients backward(grad, values, parameter), the latter's in its dtype."""

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, parameter = ctx.saved_tensors
        of_values, of_parameter = backward(grad, values, parameter)
        return of_values, of_parameter.to(parameter.dtype)

    operator.register_autograd(gradients, setup_context=keep)
