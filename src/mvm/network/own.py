"""A network of the user's, as objectives and models call one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mvm.network.dit import Output


class Own(nn.Module):
    """network(x, time, condition, taps) -> Output, by any callable (x, t, condition) or (x, t).

    The callable returns its prediction, of x's shape; the pair (prediction, inner prediction), where it has an inner
    head; or an object that has the prediction as `sample`, as diffusers' networks do. t is (B,), of x's dtype and
    float32 at least. A condition that is a mapping of the callable's own arguments is given by name, any other as its
    third argument. null, time: see mvm.wrap.
    """

    def __init__(self, network: Callable[..., Any], null: Any = None, time: Any = "t") -> None:
        super().__init__()
        if not callable(network):
            raise ValueError(
                f"network={network!r} cannot be called; give a torch module or a function (x, t, condition)"
            )
        self.network, self.null, self.time = network, null, time
        inner = getattr(network, "_orig_mod", network)  # of torch.compile
        try:
            signature = inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)
        except (TypeError, ValueError):  # some builtins have none
            self.names, self.most = (), 3
            return
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        self.names = tuple(signature.parameters)
        self.most = (
            3
            if inspect.Parameter.VAR_POSITIONAL in kinds
            else sum(kind <= kind.POSITIONAL_OR_KEYWORD for kind in kinds)
        )

    def forward(self, x: Tensor, time: Tensor, condition: Any = None, taps: Sequence[int] = ()) -> Output:
        time = time.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(condition, Mapping) and all(name in self.names[2:] for name in condition):
            answer = self.network(x, time, **condition)
        elif self.most >= 3:
            answer = self.network(x, time, condition)
        elif condition is None:
            answer = self.network(x, time)
        else:
            raise ValueError(
                f"condition is given, and the network takes ({', '.join(self.names)}); give it a third argument"
            )
        answer = getattr(answer, "sample", answer)
        prediction, inner = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        for value in (prediction,) if inner is None else (prediction, inner):
            if not isinstance(value, Tensor) or value.shape != x.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the network answers x of shape {tuple(x.shape)} with {shape}; it must be x's shape")
        return Output(prediction, inner, {})
