"""The recurrences of hybrid models as one kernel each, in place of functions that transformers' modules call.

Every modeling module has functions of its own for a step of a causal convolution, of a gated delta rule or of selective states.
They are known by name, and what takes their place was tried on the same numbers. States are the rows' own and written in place,
as some of these functions do themselves: a cache hands out states that may be changed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decodekit.core.swaps import Swap
from decodekit.kernels import triton_runs
from decodekit.kernels.conv_step import conv_step
from decodekit.kernels.gated_delta import chunked_gated_delta, gated_delta
from decodekit.kernels.selective_state_step import selective_state_step
from decodekit.runtime.agreement import close, waves

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SILU = ("silu", "swish")
_OTHERS = ("cu_seqlens", "seq_idx", "scale", "state_batch_indices")
"""Arguments that ask for something else, among all those that a model hands on and most functions ignore."""

_SELECTION = {"state", "hidden_states", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus"}

_Function = Callable[..., Any]
_Given = dict[str, Any]


def state_swaps(model: nn.Module, device: torch.device) -> list[Swap]:
    """What is replaced in the modules of Python that a model's layers come from.

    Args:
        model: the model.
        device: of its weights, where the functions are tried.
    """
    names = sorted({type(own).__module__ for own in model.modules()})
    modules = [sys.modules[name] for name in names if name in sys.modules]
    swaps = [_swap(module, name, kind, device) for module in modules for name, kind in _kinds().items()]
    return [swap for swap in swaps if swap is not None]


class _Kind(NamedTuple):
    """What replaces a function, given that, and what both are tried with; ``state`` is the argument that they write."""

    replace: Callable[[_Function], _Function]
    tries: Callable[[torch.device], Iterator[_Given]]
    state: str | None = None


_SWAPS: dict[tuple[Any, str], Swap] = {}


def _swap(module: Any, name: str, kind: _Kind, device: torch.device) -> Swap | None:
    """The swap of a function, which all models of a family share."""
    original = vars(module).get(name)
    if original is None or (module, name) in _SWAPS:
        return _SWAPS.get((module, name))
    own = kind.replace(original)
    agreed = [same for given in kind.tries(device) if (same := _agree(original, own, given, kind.state)) is not None]
    same = bool(agreed) and all(agreed)
    return _SWAPS.setdefault((module, name), Swap(module, name, own, original)) if same else None


def _agree(original: _Function, own: _Function, given: _Given, state: str | None) -> bool | None:
    """Whether both give the same numbers; ``None`` where the original takes other arguments, as in another release."""
    try:
        expected = _results(original, given, state)
    except Exception:
        return None
    try:
        return all(map(close, expected, _results(own, given, state)))
    except Exception:
        return False


def _results(call: _Function, given: _Given, state: str | None) -> list[Tensor]:
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    result = call(**copies)
    return [*(result if isinstance(result, tuple) else (result,)), *([copies[state]] if state else ())]


def _fits(hidden: Tensor, *states: Tensor) -> bool:
    """Whether the kernels take them; states that overlap they do not write."""
    return all(0 not in own.stride() for own in states) and hidden.dtype in _DTYPES and triton_runs(hidden.device)


def _convolution(original: _Function) -> _Function:
    def update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        known = activation is None or activation in _SILU
        alike = conv_state.shape[-1] == weight.shape[-1] and conv_state.stride(-1) == weight.stride(-1) == 1
        alike = alike and (bias is None or bias.stride(-1) == 1)
        if not (known and alike) or kwargs or hidden_states.dim() != 3 or not _fits(hidden_states, conv_state):
            return original(hidden_states, conv_state, weight, bias, activation, **kwargs)
        return conv_step(conv_state, None, hidden_states, weight, bias, silu=activation is not None)

    return update


def _convolution_tries(device: torch.device) -> Iterator[_Given]:
    given = {
        "hidden_states": waves(2, 16, 1, device=device),
        "conv_state": waves(2, 16, 4, device=device).cos(),
        "weight": waves(16, 4, device=device),
    }
    yield {**given, "bias": None, "activation": None}
    yield {**given, "bias": waves(16, device=device), "activation": "silu"}


def _delta_rule(original: _Function) -> _Function:
    def step(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        # A state that is not asked for stays as it is.
        if initial_state is None or not output_final_state or not _plain(value, kwargs, initial_state):
            options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return original(query, key, value, g=g, beta=beta, initial_state=initial_state, **options, **kwargs)
        query, key, value = map(_by_rows, (query, key, value))
        output = gated_delta(initial_state, None, query, key, value, g, beta, normalize=use_qk_l2norm_in_kernel)
        return output.to(query.dtype), initial_state

    return step


def _chunked_delta_rule(original: _Function) -> _Function:
    def chunks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not _plain(value, kwargs):
            options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return original(query, key, value, g=g, beta=beta, initial_state=initial_state, **options, **kwargs)
        shape = len(value), value.shape[2], key.shape[3], value.shape[3]
        state = torch.zeros(shape, dtype=torch.float32, device=value.device)
        if initial_state is not None:
            state.copy_(initial_state)
        query, key, value = map(_by_rows, (query, key, value))
        output = chunked_gated_delta(state, None, query, key, value, g, beta, normalize=use_qk_l2norm_in_kernel)
        return output.to(query.dtype), state if output_final_state else None

    return chunks


def _plain(value: Tensor, others: Mapping[str, Any], *states: Tensor) -> bool:
    """Whether nothing is asked for that the kernels do not know, and states are stored by rows."""
    by_rows = all(own.stride(-1) == 1 for own in states)
    return by_rows and _fits(value, *states) and not _asks(others)


def _by_rows(given: Tensor) -> Tensor:
    """The same numbers as the kernels read them: what comes from a convolution of many tokens lies by channels."""
    return given if given.stride(-1) == 1 else given.contiguous()


def _asks(others: Mapping[str, Any]) -> bool:
    return any(others.get(name) is not None for name in _OTHERS)


def _delta_tries(tokens: int) -> Callable[[torch.device], Iterator[_Given]]:
    def tries(device: torch.device) -> Iterator[_Given]:
        # Heads of keys that several of values share are spread by the function itself, or before.
        for normalize, heads in itertools.product((True, False), (2, 4)):
            yield {
                "query": waves(2, tokens, heads, 16, device=device) / 4,
                "key": waves(2, tokens, heads, 16, device=device).cos() / 4,
                "value": waves(2, tokens, 4, 16, device=device),
                "g": -waves(2, tokens, 4, device=device).exp() / 8,
                "beta": waves(2, tokens, 4, device=device).sigmoid(),
                "initial_state": waves(2, 4, 16, 16, device=device).cos(),
                "output_final_state": True,
                "use_qk_l2norm_in_kernel": normalize,
            }

    return tries


def _selection(original: _Function) -> _Function:
    # What another release adds may change the numbers.
    unknown = signature(original).parameters.keys() - _SELECTION

    def update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *others: Any,  # in an order of the function's own
        **options: Any,
    ) -> Any:
        more = any(options.get(name) is not None for name in unknown)
        if others or more or _asks(options) or not _fits(hidden_states, state):
            return original(state, hidden_states, dt, A, B, C, D, *others, **options)
        return selective_state_step(
            state,
            None,
            hidden_states,
            dt,
            None,
            B,
            C,
            D,
            gate=options.get("z"),
            step_bias=options.get("dt_bias"),
            softplus=options.get("dt_softplus", False),
            a=A,
            check=False,  # models compute it as -exp(A_log): to look at it would wait for the GPU
        )

    return update


def _selection_tries(*channels: int) -> Callable[[torch.device], Iterator[_Given]]:
    def tries(device: torch.device) -> Iterator[_Given]:
        groups = (2,) if len(channels) == 2 else ()
        for gated in (False, True):
            hidden = waves(2, *channels, device=device)
            yield {
                "state": waves(2, *channels, 16, device=device).cos(),
                "hidden_states": hidden,
                "dt": hidden.cos() - 1,
                "A": -waves(*channels, 16, device=device).exp(),
                "B": waves(2, *groups, 16, device=device),
                "C": waves(2, *groups, 16, device=device).cos(),
                "D": waves(*channels, device=device),
                "z": hidden.cos() if gated else None,
                "dt_bias": waves(*channels, device=device).cos(),
                "dt_softplus": True,
            }

    return tries


def _kinds() -> dict[str, _Kind]:
    kinds = {
        "causal_conv1d_update": _Kind(_convolution, _convolution_tries, "conv_state"),
        "torch_recurrent_gated_delta_rule": _Kind(_delta_rule, _delta_tries(1)),
        "mamba_selective_state_update": _Kind(_selection, _selection_tries(8), "state"),
        "mamba2_selective_state_update": _Kind(_selection, _selection_tries(4, 8), "state"),
    }
    # Where it is installed, transformers runs its chunks, which are as fast.
    if find_spec("fla") is None:
        kinds["torch_chunk_gated_delta_rule"] = _Kind(_chunked_delta_rule, _delta_tries(70))
    return kinds
