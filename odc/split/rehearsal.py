"""The check on first use: one random sample run whole and as pieces, in one process and without any exchange.

Each piece is run by itself, with the keys and values that the whole sample gave the tokens of the others. Whatever the
model does with a piece beside attention (positions, windows, mixing of tokens, statistics over a batch) then shows as a
difference between its outputs, or between the gradients of a random projection of them. The weights are moved a little,
so that nothing hides behind one that is still 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from odc.balance.slices import zigzag
from odc.errors import OdcError, UnsupportedError
from odc.split.cut import Cut
from odc.split.handle import PieceHandle, guard
from odc.split.minibatch import ending_no_minibatch
from odc.split.models import is_of_transformers, windows_of
from odc.split.nudge import NudgedWeights
from odc.split.stage import CheckStage, PieceStage, WholeStage

TOKENS, _PIECES, _IDS = 64, 2, 1000
# Of the norm of the whole sample's output: what rounding may make of it, and far below what a wrong model does.
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 0.05
_SHARE = 0.3  # of the difference that is there when the pieces do not see each other
_GRADIENTS, _GRADIENTS_HALF = 10.0, 0.15  # limits for gradients: times those for outputs, and in half precision
_NONE_ASKED = (
    "run with `odc_piece` no layer hands its attention over (it attends in a way of its own) before it fails with"
)
_SMALL = 2.0**-7  # the projection, so that a gradient which the model adds by itself stands out


class _Forward(NamedTuple):
    """One forward: output [tokens, ...], and the outputs [..., tokens, width] of its embeddings, as leaves."""

    out: Tensor
    embedded: list[Tensor]


class _Gradients(NamedTuple):
    """Of the whole sample's projection: to the probes, and by layer and place to what others lent from its keys."""

    probes: list[Tensor]
    lent: dict[int, list[Tensor]]


def rehearse(model: nn.Module, layers: int, extra: dict[str, Any]) -> int:
    """Run the check; returns the bytes that keys and values of one token take in the layer where they take most.

    Args:
        model: called six times, three of them followed by a backward. On all ranks of a sharded model. Its parameters,
            their gradients, its buffers and the random numbers of this process are afterwards as before.
        layers: attention layers it has.
        extra: keyword arguments it needs with a piece.

    Raises UnsupportedError: the outputs or gradients differ, not every layer asked for the piece, one attends twice, or
        hands over another window than its config has; names the difference.
    """
    guard(model)
    device = next(model.parameters()).device
    check = _Check(model, layers, extra, device)
    devices = [device] if device.type == "cuda" else []
    eagerly = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices), ending_no_minibatch(model), eagerly, torch.enable_grad():
        return check.run()


class _Check:
    """The check of one model; see `rehearse`."""

    def __init__(self, model: nn.Module, layers: int, extra: dict[str, Any], device: torch.device) -> None:
        self._model, self._layers, self._extra, self._device = model, layers, extra, device
        self._name = f"samples of {type(model).__name__} cannot be split"
        self._config = getattr(model, "config", None)
        draw = torch.Generator().manual_seed(0)
        vocabulary = min(int(getattr(self._config, "vocab_size", 2)), _IDS)
        self._tokens = torch.randint(vocabulary, (TOKENS,), generator=draw).to(device)
        self._weights = NudgedWeights()
        modules = list(model.modules())
        self._buffers = [(one, name, buffer) for one in modules for name, buffer in one.named_buffers(recurse=False)]
        self._drew = False  # the model draws random numbers in its forward

    def run(self) -> int:
        """See `rehearse`. The model runs with copies of its buffers, which it may write to."""
        try:
            return self._run()
        finally:
            for module, name, buffer in self._buffers:
                setattr(module, name, buffer)

    def _run(self) -> int:
        whole = WholeStage(Cut(zigzag(TOKENS, _PIECES)), self._device)
        own = self._own()
        blocks = self._staged(whole, grad=True)
        self._refuse_windows(whole)
        projection = self._projection(blocks.out)
        expected = self._of_whole(blocks, whole, projection)
        outs, alone, found = [], [], []
        for place in range(_PIECES):
            stage = PieceStage(whole, place)
            piece = self._staged(stage, grad=True)
            outs.append(piece.out.detach())
            if expected is not None:
                found.append(self._of_piece(piece, stage, projection, expected))
            alone.append(self._staged(PieceStage(whole, place, alone=True), grad=False).out)
        order, out = torch.cat(whole.at), blocks.out.detach()
        limit = max(_LIMITS.get(dtype, _HALF) for dtype in {out.dtype, *self._weights.dtypes, *whole.dtypes})
        self._refuse_outputs(own, out, torch.cat(outs), torch.cat(alone), order, limit)
        if expected is not None:
            self._refuse_gradients(expected.probes, found, order, limit)
        return max(whole.row_bytes.values())

    # running the model -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _own(self) -> Tensor:
        """Output [tokens, ...] of the sample, by the model's own attention."""
        positions = torch.arange(TOKENS, device=self._device)[None]
        options = {key: value for key, value in self._extra.items() if key != "attention_mask"}
        before = self._random_state()
        self._copy_buffers()
        with self._weights:
            given = self._model(input_ids=self._tokens[None], position_ids=positions, **options)
        self._drew = not torch.equal(before, self._random_state())
        return _output(given)[0]

    def _staged(self, stage: CheckStage, *, grad: bool) -> _Forward:
        """Output of the tokens of a stage; every layer must have asked for it."""
        positions = stage.positions[None]
        inputs = {"input_ids": self._tokens[positions], "position_ids": positions}
        embedded: list[Tensor] = []

        def probe(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            if not grad or out.ndim < 2 or out.shape[-2] != positions.shape[1]:
                return out
            embedded.append(out.detach().requires_grad_())
            return embedded[-1].clone()

        self._copy_buffers()
        hooks = [one.register_forward_hook(probe) for one in self._model.modules() if isinstance(one, nn.Embedding)]
        try:
            with torch.set_grad_enabled(grad), self._weights:
                given = self._model(**inputs, **self._extra, odc_piece=PieceHandle(stage, positions))
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, OdcError):
                raise
            how = "run with `odc_piece` it fails with" if stage.row_bytes else _NONE_ASKED
            raise UnsupportedError(f"{self._name}: {how} {type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        stage.open = False
        self._refuse_missing(sorted(stage.row_bytes))
        return _Forward(_output(given)[0], embedded)

    def _grad(self, outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        # A function that is given tensors runs outside of the mode, and a layer that it recomputes would have the
        # model's own weights. Edges of the graph are none.
        edges = [[get_gradient_edge(one) for one in tensors] for tensors in (outputs, inputs)]
        with self._weights:
            found = torch.autograd.grad(edges[0], edges[1], grads, allow_unused=True)
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True)]

    def _copy_buffers(self) -> None:
        copies = {buffer: buffer.detach().clone() for _, _, buffer in self._buffers}
        for module, name, buffer in self._buffers:
            setattr(module, name, copies[buffer])

    def _random_state(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    # gradients -------------------------------------------------------------------------------------------------------

    def _projection(self, out: Tensor) -> Tensor:
        noise: Tensor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
        scale: float = _SMALL * (len(out) / out.numel()) ** 0.5
        return noise * scale

    def _of_whole(self, whole: _Forward, stage: WholeStage, projection: Tensor) -> _Gradients | None:
        """None where nothing of the model has a gradient that can be asked for."""
        probes = whole.embedded or [stage.queries[layer] for layer in range(self._layers)]
        # A reentrant checkpoint runs its layers without gradients, and cannot be asked for those of some tensors.
        asked = [*probes, *stage.queries.values()]
        if not whole.out.requires_grad or not all(one.requires_grad for one in asked):
            return None
        places = range(_PIECES)
        borrowed = [(layer, reader, owner) for layer in stage.lent for reader in places for owner in places]
        borrowed = [(layer, reader, owner) for layer, reader, owner in borrowed if reader != owner]
        tensors = [stage.lent[layer][reader][owner] for layer, reader, owner in borrowed]
        found = self._grad([whole.out], [projection], [*probes, *tensors])
        lent = {layer: [torch.zeros_like(kv) for kv in parts[0]] for layer, parts in stage.lent.items()}
        for (layer, _, owner), one in zip(borrowed, found[len(probes) :], strict=True):
            lent[layer][owner] += one
        return _Gradients(found[: len(probes)], lent)

    def _of_piece(self, piece: _Forward, stage: PieceStage, projection: Tensor, whole: _Gradients) -> list[Tensor]:
        """To the probes of a piece: of its part of the projection, and of what the others send for its keys."""
        probes = piece.embedded or [stage.queries[layer] for layer in range(self._layers)]
        if len(probes) != len(whole.probes):
            raise UnsupportedError(f"{self._name}: a piece calls other embeddings than the whole sample")
        layers = range(self._layers)
        outputs = [piece.out, *(stage.kv[layer] for layer in layers)]
        grads = [projection[stage.positions], *(whole.lent[layer][stage.place] for layer in layers)]
        return self._grad(outputs, grads, probes)

    # refusals --------------------------------------------------------------------------------------------------------

    def _refuse_missing(self, called: list[int]) -> None:
        if called != list(range(self._layers)):
            missing = sorted(set(range(self._layers)) - set(called))
            raise UnsupportedError(
                f"{self._name}: of its {self._layers} layers these did not hand their attention over: "
                f"{', '.join(map(str, missing)) or 'none'}; it was called for layers {called}"
            )

    def _refuse_windows(self, stage: CheckStage) -> None:
        if not is_of_transformers(self._model):
            return
        for layer, expected in enumerate(windows_of(self._config, self._layers)):
            if (stage.windows[layer] or None) != expected:
                raise UnsupportedError(
                    f"{self._name}: by its config layer {layer} sees a window of {expected or 'all'} tokens, but it "
                    f"hands a window of {stage.windows[layer] or 'all'} to attention: the window is in its mask, which "
                    "a piece does not use"
                )

    def _refuse_outputs(
        self, own: Tensor, blocks: Tensor, pieces: Tensor, lonely: Tensor, order: Tensor, limit: float
    ) -> None:
        alone = _apart(lonely, own[order])
        about = f"of their norm ({self._dtypes(own)}; pieces that do not see each other differ by {alone:.1e})"
        cause = "Some layer treats a piece as a sample of its own, or mixes what its tokens hold"
        if self._drew:
            cause = "Its forward draws random numbers (dropout or noise), which a piece does not share with the whole"
        most, apart = min(limit, _SHARE * alone), _apart(pieces, blocks[order])
        if not apart <= most:
            raise UnsupportedError(
                f"{self._name}: a sample of {TOKENS} tokens in {_PIECES} pieces gives outputs that differ from the "
                f"whole sample's by {apart:.1e}, more than {most:.1e} {about}. {cause}"
            )
        # In half precision rounding may send a token to another expert, hence a share of what is certainly wrong.
        most, apart = limit if limit < _HALF else _SHARE * alone, _apart(blocks, own)
        if not apart <= most:
            raise UnsupportedError(
                f"{self._name}: its own attention and causal attention by blocks give outputs that differ by "
                f"{apart:.1e}, more than {most:.1e} {about}" + (f". {cause}" if self._drew else "")
            )

    def _refuse_gradients(self, whole: list[Tensor], pieces: list[list[Tensor]], order: Tensor, limit: float) -> None:
        most = _GRADIENTS * limit if limit < _HALF else _GRADIENTS_HALF
        for expected, *found in zip(whole, *pieces, strict=True):
            apart = _apart(torch.cat(found, -2), expected[..., order, :])
            if not apart <= most:
                raise UnsupportedError(
                    f"{self._name}: the gradients of a sample of {TOKENS} tokens in {_PIECES} pieces differ from the "
                    f"whole sample's by {apart:.1e}, more than {most:.1e} of their norm, though the outputs are alike. "
                    "Some layer adds a gradient of its own in backward, such as that of a router's loss"
                )

    def _dtypes(self, out: Tensor) -> str:
        return ", ".join(sorted({str(out.dtype), *map(str, self._weights.dtypes)}))


def _output(given: Any) -> Tensor:
    found = given if isinstance(given, Tensor) else getattr(given, "logits", None)
    if found is None:
        found = given[0]
    if not isinstance(found, Tensor):
        raise UnsupportedError(f"the model returns {type(found).__name__}, not logits [rows, tokens, ...]")
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))
