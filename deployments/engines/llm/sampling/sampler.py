"""Picks the next token of every row, in one batch: greedy, or drawn after penalties and filters.

A row is changed and filtered in this order, each filter on what the one before left (as in transformers): repetition
penalty, frequency and presence penalty, logit bias, constraint, top-n-sigma, temperature, top-k, top-p, min-p, typical.
Tokens equal to the last one that a filter keeps are kept as well, so the result depends on the logits
alone.

A row's token does not depend on other rows, bit for bit: every sum runs in its own row's order.

Suffixes: N rows, V vocabulary, B blocks of `_BLOCK` tokens, S candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from deployments.engines.llm.sampling.token_picker import TokenPicker
from deployments.engines.native.library import DrawnRow, Kernels, load_kernels
from deployments.engines.records.protocol import ComputationFailed, EngineError, SamplingParams, TokenLogprob

_BLOCK: Final = 128  # tokens: the maxima of blocks tell where the best tokens are
_FEW: Final = 64  # candidates looked at first
_MAX_FEW: Final = 256
_MANY: Final = 4096  # candidates looked at before the whole vocabulary is sorted
_ROWS_AT_ONCE: Final = 2
_TINY_TEMPERATURE: Final = 1e-3
_LEAST_TEMPERATURE: Final = 1e-30
_BITS: Final = 32  # of a word of a constraint's mask
_SEED_LIMITS: Final = (-(2**63), 2**64 - 1)  # accepted by torch.Generator.manual_seed
_MAX_BIAS: Final = 100.0  # OpenAI's
_MAX_LOGPROBS: Final = 20  # OpenAI's


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's token and, if requested, log probabilities of the model itself: of this token and the best.

    They are those of the original logits, before penalties, bias, constraint and temperature.
    """

    token_id: int
    logprob: TokenLogprob | None = None


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise EngineError unless every parameter is in its range."""
    low, high = _SEED_LIMITS
    infinite = float("inf")
    penalty = sampling.repetition_penalty
    rules = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < infinite, "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 to 1"),
        ("typical_p", sampling.typical_p, 0 < sampling.typical_p <= 1, "more than 0 and at most 1"),
        ("repetition_penalty", penalty, 0 < penalty < infinite, "more than 0"),
        ("frequency_penalty", sampling.frequency_penalty, abs(sampling.frequency_penalty) < infinite, "a number"),
        ("presence_penalty", sampling.presence_penalty, abs(sampling.presence_penalty) < infinite, "a number"),
        ("top_n_sigma", sampling.top_n_sigma, 0 <= sampling.top_n_sigma < infinite, "0 or more"),
        ("num_logprobs", sampling.num_logprobs, 0 <= (sampling.num_logprobs or 0) <= _MAX_LOGPROBS, "0 to 20"),
        ("seed", sampling.seed, sampling.seed is None or low <= sampling.seed <= high, f"{low} to {high}"),
        ("stop", sampling.stop, all(sampling.stop), "strings that are not empty"),
    )
    for name, value, holds, expected in rules:
        if not holds:
            raise EngineError(f"{name} is {value!r}; expected {expected}")
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size or not abs(bias) <= _MAX_BIAS:
            raise EngineError(
                f"logit_bias of token {token_id} is {bias!r}; expected tokens 0 to {vocab_size - 1} and -100 to 100"
            )


@torch.inference_mode()  # logits made in inference mode may be changed in place only in it
def sample(logits_NV: torch.Tensor, pickers: Sequence[TokenPicker]) -> list[SampledToken | ComputationFailed]:
    """Pick one token per row of the float32 logits, which may be changed, or return why a row has none.

    A row without a usable maximum (NaN, infinity) fails, and its generator is not advanced. The caller tells the
    pickers which tokens it uses (`TokenPicker.advance`).
    """
    if not pickers:
        return []
    wanted = [row for row, picker in enumerate(pickers) if picker.params.num_logprobs is not None]
    changed = any(pickers[row].changes_logits or pickers[row].params.top_n_sigma for row in wanted)
    raw_NV = logits_NV.clone() if changed else logits_NV
    constrained = _change_logits(logits_NV, pickers)
    maxima_NB = _block_maxima(logits_NV)
    best_N, block_N = maxima_NB.max(-1)
    best, first = best_N.tolist(), _first_of(logits_NV, block_N)
    tokens = {row: first[row] for row, picker in enumerate(pickers) if picker.is_greedy and math.isfinite(best[row])}
    drawn = [row for row, picker in enumerate(pickers) if not picker.is_greedy and math.isfinite(best[row])]
    if drawn:
        tokens |= zip(drawn, _draw(logits_NV, maxima_NB, drawn, pickers), strict=True)
    scored = [row for row in wanted if row in tokens]
    logprobs = score_tokens(
        raw_NV, scored, [tokens[row] for row in scored], [pickers[row].params.num_logprobs or 0 for row in scored]
    )
    logprob_of = dict(zip(scored, logprobs, strict=True))
    outcomes: list[SampledToken | ComputationFailed] = []
    for row in range(len(pickers)):
        if row in tokens:
            outcomes.append(SampledToken(tokens[row], logprob_of.get(row)))
        elif row in constrained and best[row] == -math.inf:
            outcomes.append(ComputationFailed("no token of the vocabulary fits the grammar here"))
        else:
            outcomes.append(ComputationFailed("the logits are not finite"))
    return outcomes


def _change_logits(logits_NV: torch.Tensor, pickers: Sequence[TokenPicker]) -> set[int]:
    """Apply penalties, biases and constraints in place. Return the rows with a constraint."""
    device = logits_NV.device
    _penalize(logits_NV, pickers)
    biases = [(row, token, bias) for row, picker in enumerate(pickers) for token, bias in picker.params.logit_bias]
    if biases:
        rows, tokens, values = (torch.tensor(column, device=device) for column in zip(*biases, strict=True))
        logits_NV.index_put_((rows, tokens), values.to(logits_NV.dtype), accumulate=True)
    constrained = [(row, held) for row, picker in enumerate(pickers) if (held := picker.mask) is not None]
    if constrained:
        size = logits_NV.shape[1]
        masks = np.zeros((len(constrained), -(-size // _BITS)), np.int32)
        for mask, (_, constraint) in zip(masks, constrained, strict=True):
            constraint.fill_mask(mask)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=size)
        rows = torch.tensor([row for row, _ in constrained], device=device)
        forbidden = torch.from_numpy(bits == 0).to(device)
        logits_NV[rows] = logits_NV[rows].masked_fill_(forbidden, float("-inf"))
    for row, picker in enumerate(pickers):
        if picker.params.top_n_sigma > 0:
            _cut_below(logits_NV[row], picker.params.top_n_sigma)
    return {row for row, _ in constrained}


def _cut_below(logits_V: torch.Tensor, num_deviations: float) -> None:
    """Take out tokens too far below the best one, in place.

    Top-n-sigma: Tang et al., arXiv:2411.07641. Tokens taken out before do not count.
    """
    left = logits_V[logits_V.isfinite()].double()
    if not len(left):
        return
    mean = left.cumsum(0)[-1] / len(left)  # added one by one: the same for any number of threads
    deviation = ((left - mean).square().cumsum(0)[-1] / len(left)).sqrt()
    logits_V.masked_fill_(logits_V.double() < logits_V.max() - num_deviations * deviation, float("-inf"))


def _penalize(logits_NV: torch.Tensor, pickers: Sequence[TokenPicker]) -> None:
    penalized = [(row, picker.params, seen) for row, picker in enumerate(pickers) if (seen := picker.seen) is not None]
    if not penalized:
        return
    lengths = [len(seen.ids) for _, _, seen in penalized]
    settings = [
        (row, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for row, params, _ in penalized
    ]
    row, repetition, frequency, presence = (np.repeat(column, lengths) for column in zip(*settings, strict=True))
    counts = np.concatenate([seen.counts for _, _, seen in penalized])
    minus = torch.from_numpy(frequency * counts + presence * (counts > 0)).to(logits_NV)
    factor = torch.from_numpy(np.asarray(repetition, np.float64)).to(logits_NV)
    token_ids = np.concatenate([seen.ids for _, _, seen in penalized])
    places = torch.from_numpy(row).to(logits_NV.device), torch.from_numpy(token_ids).to(logits_NV.device)
    values = logits_NV[places]
    logits_NV.index_put_(places, torch.where(values > 0, values / factor, values * factor) - minus)


def _blocks(rows_NV: torch.Tensor) -> torch.Tensor:
    """Return the rows in blocks (N, B, _BLOCK); if the last is not full, a copy padded with -inf."""
    missing = -rows_NV.shape[1] % _BLOCK
    padded = F.pad(rows_NV, (0, missing), value=float("-inf")) if missing else rows_NV
    return padded.view(len(rows_NV), -1, _BLOCK)


def _block_maxima(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the best logit of each block of _BLOCK tokens (N, B), the last of which may be shorter."""
    num_rows, size = logits_NV.shape
    whole = size - size % _BLOCK
    maxima = [logits_NV[:, :whole].view(num_rows, whole // _BLOCK, _BLOCK).amax(-1)]
    if whole < size:
        maxima.append(logits_NV[:, whole:].amax(-1, keepdim=True))
    return torch.cat(maxima, 1)


def _first_of(logits_NV: torch.Tensor, block_N: torch.Tensor) -> list[int]:
    """Return the lowest of the best tokens of a block of each row."""
    places_NT = block_N[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits_NV.device)
    places_NT.clamp_(max=logits_NV.shape[1] - 1)
    return places_NT.gather(1, logits_NV.gather(1, places_NT).argmax(-1, keepdim=True))[:, 0].tolist()


def _draw(
    logits_NV: torch.Tensor, maxima_NB: torch.Tensor, rows: Sequence[int], pickers: Sequence[TokenPicker]
) -> list[int]:
    """Draw one token for each of the rows: with the compiled kernels (native/draws.h), else with torch."""
    best_N = maxima_NB.amax(-1)
    draws = {row: float(torch.rand(1, generator=pickers[row].generator, dtype=torch.float64)) for row in rows}
    if (kernels := _kernels_for(logits_NV)) is not None:
        best = best_N.tolist()
        asked = [_drawn_row(row, best[row], draws[row], pickers[row].params) for row in rows]
        return kernels.draw_tokens(logits_NV, maxima_NB.contiguous(), _BLOCK, asked)
    tokens: dict[int, int] = {}
    # A filter after top-k needs only its k tokens; any other one needs the probabilities of the whole vocabulary.
    whole = [row for row in rows if not 0 < pickers[row].params.top_k < logits_NV.shape[1]]
    totals: dict[int, float] = {}
    if whole:
        temperatures = [pickers[row].params.temperature for row in whole]
        sums_NB, best_share_N = _shares(logits_NV, best_N, whole, temperatures)
        totals = {row: 1 / share for row, share in zip(whole, best_share_N.tolist(), strict=True)}
        plain = [place for place, row in enumerate(whole) if not _is_filtered(pickers[row].params)]
        if plain:
            chosen = [whole[place] for place in plain]
            temperature = torch.tensor([[temperatures[place]] for place in plain], dtype=torch.float64)
            point = torch.tensor([[draws[row]] for row in chosen], dtype=torch.float64)
            found = _invert(_blocks(logits_NV), sums_NB[plain], chosen, temperature.to(sums_NB), point.to(sums_NB))
            tokens |= zip(chosen, found, strict=True)
    left = [row for row in rows if row not in tokens]
    few = max((pickers[row].params.top_k for row in left if pickers[row].params.top_k < _MAX_FEW), default=0)
    for num_candidates in (max(_FEW, -(-(few + 1) // _FEW) * _FEW), _MANY, logits_NV.shape[1]):
        if not left:
            break
        values, token_ids = _best(logits_NV, maxima_NB, left, num_candidates)
        is_whole = values.shape[1] == logits_NV.shape[1]
        drawn = _draw_filtered(
            values, token_ids, [pickers[row].params for row in left], totals, left, draws, is_whole=is_whole
        )
        tokens |= {row: token for row, token in zip(left, drawn, strict=True) if token is not None}
        left = [row for row in left if row not in tokens]
    return [tokens[row] for row in rows]


def _kernels_for(logits_NV: torch.Tensor) -> Kernels | None:
    """Return the compiled kernels if they can read the logits."""
    return load_kernels() if logits_NV.device.type == "cpu" and logits_NV.is_contiguous() else None


def _drawn_row(row: int, best: float, draw: float, params: SamplingParams) -> DrawnRow:
    filters = params.temperature, params.top_p, params.min_p, params.typical_p
    return DrawnRow(row, params.top_k, best, draw, *filters)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def _shares(
    logits_NV: torch.Tensor, best_N: torch.Tensor, rows: Sequence[int], temperatures: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probability of each block of tokens (N, B) and of the best token (N,), after temperature, in float64.

    A few rows at a time, which stay in the processor's cache.
    """
    if (kernels := _kernels_for(logits_NV)) is not None:
        factors = [1 / max(scale, _LEAST_TEMPERATURE) for scale in temperatures]
        unscaled = kernels.exponential_sums(logits_NV, list(rows), best_N[list(rows)], factors, _BLOCK)
        share_N = 1 / unscaled.cumsum(-1)[:, -1]  # added one by one: the same in any batch
        return unscaled * share_N[:, None], share_N
    size = _ROWS_AT_ONCE if logits_NV.device.type == "cpu" else len(rows)
    sums, best = [], []
    for start in range(0, len(rows), size):
        some, scales = rows[start : start + size], temperatures[start : start + size]
        is_run = some[-1] - some[0] == len(some) - 1
        given = logits_NV[some[0] : some[-1] + 1] if is_run else logits_NV[list(some)]
        if any(scale != 1 for scale in scales):
            if min(scales) < _TINY_TEMPERATURE:
                given = given - best_N[list(some)][:, None]  # the products would be infinite
            factor = torch.tensor([[1 / max(scale, _LEAST_TEMPERATURE)] for scale in scales], dtype=torch.float64).to(
                given
            )
            given = given * factor
        shares = given.softmax(-1)
        missing = -shares.shape[1] % _BLOCK
        padded = F.pad(shares, (0, missing)) if missing else shares
        sums.append(padded.view(len(some), -1, _BLOCK).sum(-1).double())
        best.append(shares.amax(-1).double())
    return torch.cat(sums), torch.cat(best)


def _invert(
    blocks_NB: torch.Tensor, sums_NB: torch.Tensor, rows: Sequence[int], temperature: torch.Tensor, draws: torch.Tensor
) -> list[int]:
    """Return the token of each row where the cumulative probability passes the row's draw (N, 1).

    The sum runs in the order of token ids, not of probability: then a rounding difference in the logits moves
    the borders between tokens by as little, and never exchanges two of them.
    """
    cumulative = sums_NB.cumsum(-1)
    points = draws * cumulative[:, -1:]
    block_N = _first_beyond(cumulative, points)
    places = torch.arange(len(rows), device=cumulative.device)
    own = sums_NB[places, block_N]
    share = (points[:, 0] - (cumulative[places, block_N] - own)) / own
    inside = blocks_NB[torch.tensor(rows, device=blocks_NB.device), block_N].double()
    inner = ((inside - inside.amax(-1, keepdim=True)) / temperature).exp().cumsum(-1)
    inner_N = _first_beyond(inner, share[:, None] * inner[:, -1:])
    found: list[int] = (block_N * _BLOCK + inner_N).tolist()
    return found


def _first_beyond(sums_NS: torch.Tensor, points_N1: torch.Tensor) -> torch.Tensor:
    """Return the first place of each row with a sum above the point; else the last place that adds to the sum."""
    last = torch.searchsorted(sums_NS, sums_NS[:, -1:].contiguous())  # the first place where the sum is complete
    return torch.minimum(torch.searchsorted(sums_NS, points_N1, right=True), last)[:, 0]


def _best(
    logits_NV: torch.Tensor, maxima_NB: torch.Tensor, rows: Sequence[int], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best `num_candidates` tokens of the rows, or all: values in descending order, and ids."""
    size, num_blocks = logits_NV.shape[1], maxima_NB.shape[1]
    places = torch.tensor(rows, device=logits_NV.device)
    if num_candidates >= size:
        return torch.sort(logits_NV[places], dim=-1, descending=True)
    if num_candidates >= num_blocks:
        return logits_NV[places].topk(num_candidates, -1)
    # The best n tokens lie in the n blocks with the best maxima.
    chosen = maxima_NB[places].topk(num_candidates, -1).indices
    values, found = _blocks(logits_NV)[places[:, None], chosen].flatten(1).topk(num_candidates)
    return values, chosen.gather(1, found // _BLOCK) * _BLOCK + found % _BLOCK


def _draw_filtered(
    values_NS: torch.Tensor,
    token_ids_NS: torch.Tensor,
    params: Sequence[SamplingParams],
    totals: dict[int, float],
    rows: Sequence[int],
    draws: dict[int, float],
    *,
    is_whole: bool,
) -> list[int | None]:
    """Draw a token of each row's candidates, or None if its filters may keep tokens outside of them."""
    kept, weights, may_lack = _filter_candidates(values_NS, params, [totals.get(row, 0.0) for row in rows])
    has_all = [row in totals or one.top_k < values_NS.shape[1] for row, one in zip(rows, params, strict=True)]
    is_enough = ~may_lack & torch.tensor(has_all, device=kept.device) if not is_whole else torch.ones_like(may_lack)
    masked_ids = token_ids_NS.masked_fill(~kept, torch.iinfo(token_ids_NS.dtype).max)
    ids, order = masked_ids.sort(-1)
    sums = weights.masked_fill(~kept, 0.0).gather(1, order).cumsum(-1)
    points = torch.tensor([draws[row] for row in rows], dtype=torch.float64, device=sums.device)[:, None]
    found = ids.gather(1, _first_beyond(sums, points * sums[:, -1:])[:, None])[:, 0]
    return [int(token) if enough else None for token, enough in zip(found.tolist(), is_enough.tolist(), strict=True)]


def _filter_candidates(
    values_NS: torch.Tensor, params: Sequence[SamplingParams], totals: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which candidates the filters keep, unnormalized float64 probabilities of all, and (N,) which rows may lack
    tokens that are not among the candidates.

    `values_NS` are the best logits of each row in descending order. `totals` are the sums of exp((logit - best) /
    temperature) over the whole vocabulary, or 0 for a row with top-k, whose k tokens are among the candidates."""

    def column(numbers: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64, device=values_NS.device)[:, None]

    temperature = column(one.temperature for one in params)
    weights = ((values_NS - values_NS[:, :1]).double() / temperature).exp()
    size = values_NS.shape[1]
    top_k = torch.tensor([[one.top_k if 0 < one.top_k < size else size] for one in params], device=values_NS.device)
    kept = values_NS >= values_NS.gather(1, top_k - 1)
    total = torch.where(column(totals) > 0, column(totals), _sum_kept(weights, kept))
    top_p = column(one.top_p for one in params)
    if any(one.top_p < 1 for one in params):
        before = weights.cumsum(-1) - weights
        kept &= _with_ties(values_NS, (before < top_p * total) | (top_p >= 1))
    kept &= weights >= column(one.min_p for one in params)  # the best has 1
    may_lack = kept[:, -1]  # equals of the last candidate may lie outside
    if any(one.typical_p < 1 for one in params):
        kept = kept & _typical(weights, kept, column(one.typical_p for one in params))
    return kept & (weights > 0), weights, may_lack


def _sum_kept(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the sums (N, 1) over the kept tokens, added one by one, so that trailing zeros change nothing."""
    return torch.where(kept, weights, 0.0).cumsum(-1)[:, -1:]


def _with_ties(values_NS: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Add to the first, kept tokens those equal to the last of them."""
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1
    return values_NS >= values_NS.gather(1, last)


def _typical(weights: torch.Tensor, kept: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose surprise is nearest to the entropy, until their probability sums to `typical_p`.

    Locally typical sampling: Meister et al., arXiv:2202.00666.
    """
    total = _sum_kept(weights, kept)
    logs = (weights / total).log()
    shares = torch.where(kept & (weights > 0), weights / total, 0.0)
    entropy = -torch.where(shares > 0, shares * logs, 0.0).cumsum(-1)[:, -1:]
    distance = torch.where(shares > 0, (-logs - entropy).abs(), float("inf"))
    ordered, order = torch.sort(distance, dim=-1)
    sums = shares.gather(1, order).cumsum(-1)
    last = (sums < typical_p).sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return (distance <= ordered.gather(1, last)) | (typical_p >= 1)


def score_tokens(
    logits_NV: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], num_best: Sequence[int]
) -> list[TokenLogprob]:
    """Return the log probability of a token of each row, and those of the row's best tokens."""
    if not rows:
        return []
    maxima_NB = _blocks(logits_NV).amax(-1)
    best_N = maxima_NB.amax(-1)
    _, best_share_N = _shares(logits_NV, best_N, rows, [1.0] * len(rows))
    zero = (best_N[list(rows)].double() - best_share_N.log())[:, None]  # the logit of probability 1
    own = (logits_NV[list(rows), list(tokens)][:, None].double() - zero)[:, 0].tolist()
    best: list[list[tuple[int, float]]] = [[] for _ in rows]
    if any(num_best):
        values, token_ids = _best(logits_NV, maxima_NB, rows, max(num_best))
        logprobs = (values.double() - zero).tolist()
        best = [list(zip(ids, row, strict=True)) for ids, row in zip(token_ids.tolist(), logprobs, strict=True)]
    return [
        TokenLogprob(token, value, tuple(found[:count]))
        for token, value, found, count in zip(tokens, own, best, num_best, strict=True)
    ]
