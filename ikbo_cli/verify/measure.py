"""One ratio case: draws are made and interpreted until every output is large enough, then compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ikbo_cli.program import source_location
from ikbo_cli.results import VerifyCase
from ikbo_cli.verify.cases import RatioCase
from ikbo_cli.verify.execute import run_program
from ikbo_cli.verify.gate import EQUIVALENCE, Draw, Gate, Outcome, compare_output, differing, rms
from ikbo_cli.verify.graphs import inlined, output_names
from ikbo_cli.verify.inputs import CaseInputs, InputMaker
from ikbo_cli.verify.reference import run_reference, trace_reference
from ikbo_cli.verify.selections import Choice, place_of, regret, selections

MAX_DRAWS = 512


@dataclasses.dataclass
class _Scores:
    """What the original's compared scores are off by, per place in the source, over the draws of a case."""

    largest: dict[tuple[str | None, ...], float] = dataclasses.field(default_factory=dict)
    relative: float = 0.0

    def add(self, node: fx.Node, own: Choice, truth: Choice) -> None:
        scores = truth.scores
        error = (own.scores - scores).nan_to_num(0, 0, 0)
        largest = float(error.abs().max()) if error.numel() else 0.0
        self.largest[place_of(node)] = max(largest, self.largest.get(place_of(node), 0.0))
        scale = rms(scores[scores.isfinite()])
        self.relative = max(self.relative, largest / scale if scale else 0.0)

    def error(self, node: fx.Node, scale: float) -> float:
        """Of the same place; of a place that the original does not have, as much relative to the scores."""
        return self.largest.get(place_of(node), self.relative * scale)


class CaseRunner:
    """Runs the cases of one pair of programs."""

    def __init__(self, original: fx.GraphModule, optimized: fx.GraphModule, maker: InputMaker, gate: Gate) -> None:
        self.original, self.optimized = inlined(original), inlined(optimized)
        self.maker = maker
        self.gate = gate
        self.names = output_names(self.original)
        self.old_selections = selections(self.original.graph)
        self.new_selections = selections(self.optimized.graph)

    @property
    def selective(self) -> bool:
        """Whether one of the programs decides something by comparing computed values."""
        return bool(self.old_selections or self.new_selections)

    def check(self, case: RatioCase, seed: int, pool: int) -> tuple[VerifyCase, str]:
        """Compare the programs in one fitted case.

        Args:
            case: The case.
            seed: Seed of the first draw; the following draws count up from it.
            pool: Elements that every output must have over all draws.

        Returns:
            The result, and the worst output's name.
        """
        drawn: list[list[Draw]] = []
        rows = 0
        scores = _Scores()
        pending: list[tuple[fx.Node, Choice, int]] = []
        for number in range(MAX_DRAWS):
            inputs = self.maker.draw(case, seed + number)
            if self.selective:
                outputs, differ, failure = self._selective(inputs, seed + number, scores, pending)
                rows += differ
                if failure is not None:
                    return _failed(case, failure, rows), "float64 run"
            else:
                outputs = self._plain(inputs, seed + number)
            drawn.append(outputs)
            floats = [d.original.numel() for d in outputs if d.original.dtype.is_floating_point]
            if min((n for n in floats if n), default=pool) * (number + 1) >= pool:
                break
        unjustified = self._unjustified(scores, pending)
        if unjustified is not None:
            return _failed(case, unjustified, rows), "a selection"
        worst: tuple[Outcome, str] | None = None
        for position, draws in enumerate(zip(*drawn, strict=True)):
            outcome = compare_output(draws, self.gate)
            name = self.names[position] if position < len(self.names) else str(position)
            if worst is None or outcome.badness > worst[0].badness:
                worst = outcome, f"output {position} ({name})"
        if worst is None:
            return _failed(case, "the programs have no outputs", rows), "program"
        found = worst[0]
        return VerifyCase(
            case.name, case.batch, case.users, found.passed, found.allowed, found.rms_original, found.rms_optimized,
            found.max_abs, rows, found.reason,
        ), worst[1]  # fmt: skip

    def _plain(self, inputs: CaseInputs, seed: int) -> list[Draw]:
        truths = run_reference(self.original, inputs.original)
        first, _ = run_program(self.original, inputs.original)
        second, _ = run_program(self.optimized, inputs.optimized)
        return [Draw(seed, a, b, t, t) for a, b, t in zip(first, second, truths, strict=True)]

    def _selective(
        self, inputs: CaseInputs, seed: int, scores: _Scores, pending: list[tuple[fx.Node, Choice, int]]
    ) -> tuple[list[Draw], int, str | None]:
        """A draw of programs that select: (outputs, rows in which they selected differently, why it failed)."""
        failure = self._inequivalent(inputs, seed)
        if failure is not None:
            return [], 0, failure
        first, own = run_program(self.original, inputs.original, self.old_selections)
        second, theirs = run_program(self.optimized, inputs.optimized, self.new_selections)
        old_truths, old_made = trace_reference(self.original, inputs.original, _chosen(own))
        new_truths, new_made = trace_reference(self.optimized, inputs.optimized, _chosen(theirs))
        for node in self.old_selections:
            scores.add(node, own[node.name], old_made[node.name])
        pending += [(node, new_made[node.name], seed) for node in self.new_selections]
        draws, rows = [], torch.zeros(0, dtype=torch.bool)
        for a, b, old, new in zip(first, second, old_truths, new_truths, strict=True):
            excused = differing(old, new) if old.shape == new.shape else None
            draws.append(Draw(seed, a, b, old, new, excused))
            if excused is not None and excused.dim():
                here = excused.flatten(1).any(1) if excused.dim() > 1 else excused
                rows = here | rows if rows.shape == here.shape else here if len(rows) < len(here) else rows
        return draws, int(rows.sum()), None

    def _inequivalent(self, inputs: CaseInputs, seed: int) -> str | None:
        """Why the programs differ in float64, where rounding decides nothing; None if they agree.

        Exact ties may fall differently: then the optimized program must agree once it takes the original's choices,
        and those must be as good by its own scores.
        """
        truths, made = trace_reference(self.original, inputs.original)
        reason = self._difference(truths, run_reference(self.optimized, inputs.optimized), seed)
        if reason is None:
            return None
        forced = [self._translated(made, inputs, compact=compact) for compact in (False, True)]
        agree = any(choices is not None and self._agree_on(choices, truths, inputs, seed) for choices in forced)
        return None if agree else reason

    def _agree_on(
        self, forced: Mapping[str, torch.Tensor], truths: Sequence[torch.Tensor], inputs: CaseInputs, seed: int
    ) -> bool:
        """Whether the optimized program gives `truths` when it takes these choices, and they are as good to it."""
        again, taken = trace_reference(self.optimized, inputs.optimized, forced)
        for node in self.new_selections:
            loss, scale = regret(node, taken[node.name]), rms(taken[node.name].scores)
            if loss.numel() and float(loss.max()) > EQUIVALENCE * scale:
                return False
        return self._difference(truths, again, seed) is None

    def _difference(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], seed: int) -> str | None:
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            name = self.names[position] if position < len(self.names) else str(position)
            if a.shape != b.shape:
                return f"output {position} ({name}): shape {tuple(a.shape)}, optimized {tuple(b.shape)}"
            wrong = differing(a, b)
            if bool(wrong.any()):
                place = tuple(wrong.nonzero()[0].tolist())
                return (
                    f"output {position} ({name}) differs in float64 at {place}, seed {seed}: "
                    f"{a[place].item():.6g} in the original, {b[place].item():.6g} optimized"
                )
        return None

    def _translated(
        self, made: Mapping[str, Choice], inputs: CaseInputs, *, compact: bool
    ) -> dict[str, torch.Tensor] | None:
        """The original's choices in the shapes of the optimized program, paired by place in the source, in order.

        With `compact`, a choice with a row a candidate becomes one with a row a user: that of any of its candidates.
        """
        partners: dict[tuple[str | None, ...], list[fx.Node]] = {}
        for node in self.old_selections:
            partners.setdefault(place_of(node), []).append(node)
        _, own = trace_reference(self.optimized, inputs.optimized)
        present = inputs.index.unique()
        candidate = torch.zeros(int(present.max()) + 1, dtype=torch.int64)
        candidate = candidate.scatter(0, inputs.index, torch.arange(len(inputs.index)))[present]
        forced: dict[str, torch.Tensor] = {}
        for node in self.new_selections:
            candidates = partners.get(place_of(node))
            if not candidates:
                return None
            theirs, mine = made[candidates.pop(0).name].chosen, own[node.name].chosen
            if compact and theirs.dim() and len(theirs) == len(inputs.index) and len(mine) > int(present.max()):
                # Users without a candidate keep their own choice.
                theirs = mine.clone().index_copy(0, present, theirs[candidate])
            if theirs.shape != mine.shape:
                return None
            forced[node.name] = theirs
        return forced

    def _unjustified(self, scores: _Scores, pending: Sequence[tuple[fx.Node, Choice, int]]) -> str | None:
        """A selection of the optimized program that its scores' allowed error does not explain."""
        for node, choice, seed in pending:
            compared = choice.scores
            scale = rms(compared[compared.isfinite()])
            # Each of two scores may be off by as much.
            allowed = 2 * self.gate.largest(scores.error(node, scale), scale)
            loss = regret(node, choice).nan_to_num(0, 0, 0)
            if loss.numel() and float(loss.max()) > allowed:
                row = int(loss.flatten(1).amax(1).argmax()) if loss.dim() > 1 else int(loss.argmax())
                return (
                    f"{node.target} ({source_location(node) or node.name}) chose a score {float(loss.max()):.3g} away "
                    f"from the one to choose, allowed are {allowed:.3g}; row {row}, seed {seed}"
                )
        return None


def _chosen(choices: Mapping[str, Choice]) -> dict[str, torch.Tensor]:
    return {name: choice.chosen for name, choice in choices.items()}


def _failed(case: RatioCase, reason: str, rows: int) -> VerifyCase:
    return VerifyCase(case.name, case.batch, case.users, False, 0.0, 0.0, float("inf"), float("inf"), rows, reason)
