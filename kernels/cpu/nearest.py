"""Which tokens are the smallest set nearest to some logit with a given mass, without sorting the vocabulary: nearest to
the largest logit for top-p, to the mean logit for typical-p."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.kernels.cpu.candidates import bounds, descending, select
from workerkit.kernels.cpu.softmax import ROUNDING, exp_sum, mean_logit

_COUNT = 512  # candidates that are looked at first; models are seldom in doubt between more
_HALVINGS = 10  # of some 20 units of logit, so that few tokens are left
_SLACK = 1e-3  # more than any rounding
_CHUNK = 8  # rows at a time, which stay in the processor's cache
_INF = float("inf")


def top_p_threshold(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """logits [n, V] float32, p [n] below 1 -> the smallest logit that top-p keeps, [n, 1] float32."""
    largest = logits.amax(-1, keepdim=True)
    goal = p[:, None].double() * exp_sum(logits, largest)
    chosen = descending(select(logits, logits, bounds(logits, np.full(len(logits), _COUNT))))
    threshold, _ = _last(chosen, largest, goal)
    for rows in _chunks(threshold.isnan()):
        exact, weights, _, goal, largest, low = _exact_weights(logits[rows], p[rows])
        threshold[rows] = -_radius(-exact, weights, goal, -largest, -low).float()
    return threshold


def typical_span(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] float32, p [n] below 1 -> numbers [n, 1] float32 between which lie the logits that typical-p keeps.

    Entropy less surprise is logit less mean logit.
    """
    largest = logits.amax(-1, keepdim=True)
    centre, total = mean_logit(logits, largest)
    key = (logits - centre.float()).abs_().neg_()
    bound = bounds(key, np.full(len(logits), _COUNT))
    chosen = torch.from_numpy(select(logits, key, bound))
    distance = (chosen.double() - centre).abs_()
    order = torch.from_numpy(distance.numpy().argsort(axis=1))
    chosen, distance = chosen.gather(-1, order), distance.gather(-1, order)
    found, at = _last(chosen, largest, p[:, None].double() * total)
    # Two distances that differ by less than float32's error may be in either order, so no other may be that near.
    margin = ROUNDING * (1 + largest.abs() + largest - centre)
    radius = distance.gather(-1, at)
    alone = (((distance - radius).abs() <= margin) == (chosen == found)).all(-1, keepdim=True)
    radius[~(alone & (radius + margin <= -torch.from_numpy(bound)[:, None]))] = float("nan")
    least, most = (centre - radius - margin / 2).float(), (centre + radius + margin / 2).float()
    for rows in _chunks(radius.isnan()):
        exact, weights, total, goal, largest, low = _exact_weights(logits[rows], p[rows])
        centre = torch.where(weights > 0, exact * weights, 0.0).sum(-1, keepdim=True) / total
        distance = (exact - centre).abs_().float().double()  # rounded as in the reference
        far = torch.maximum(largest - centre, centre - low) + _SLACK
        radius = _radius(distance, weights, goal, torch.zeros_like(far), far)
        radius = (radius + torch.nextafter(radius.float(), torch.tensor(_INF))) / 2  # what rounds to a smaller one
        least[rows], most[rows] = _ceil(centre - radius), -_ceil(-centre - radius)
    return least, most


def _last(chosen: torch.Tensor, largest: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates [n, W] from the nearest on -> the one with which the weight reaches the goal, and where it is, [n, 1];
    NaN where it is none of them, or float32's error in the goal decides."""
    end = chosen.shape[1] - 1
    mass = torch.from_numpy(np.exp((chosen.double() - largest).numpy())).cumsum(-1)
    early, late = ((mass < goal * error).sum(-1, keepdim=True) for error in (1 - ROUNDING, 1 + ROUNDING))
    at = late.clamp(max=end)
    found = chosen.gather(-1, at)
    return found.where((late <= end) & (chosen.gather(-1, early.clamp(max=end)) == found), float("nan")), at


def _exact_weights(logits: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In float64: the logits, their weights, and [n, 1] each the total weight, its share p, the largest logit and one
    below which there is less than the rest of the weight."""
    exact = logits.double()
    largest = exact.amax(-1, keepdim=True)
    weights = (exact - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    goal = p[:, None].double() * total
    return exact, weights, total, goal, largest, largest + ((total - goal) / logits.shape[1]).log() - _SLACK


def _radius(
    distance: torch.Tensor, weights: torch.Tensor, goal: torch.Tensor, near: torch.Tensor, far: torch.Tensor
) -> torch.Tensor:
    """The distance with which the weight reaches the goal, [n, 1], by bisection: no distance is below `near`, and what
    is nearer than `far` weighs enough. float64; however many tokens stay."""
    base = torch.zeros_like(goal)  # what is nearer than `near` weighs so much, less than the goal
    inside = torch.empty_like(weights)
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        weight = torch.lt(distance, middle, out=inside).mul_(weights).sum(-1, keepdim=True)
        enough = weight >= goal
        far = torch.where(enough, middle, far)
        near, base = torch.where(enough, near, middle), torch.where(enough, base, weight)
    radius = far.clone()
    for row in range(len(distance)):
        window = ((distance[row] >= near[row]) & (distance[row] < far[row])).nonzero()[:, 0]
        nearest, order = distance[row, window].sort()
        mass = base[row] + weights[row, window[order]].cumsum(0)
        if len(window):
            radius[row] = nearest[min(int((mass < goal[row]).sum()), len(window) - 1)]
    return radius


def _ceil(x: torch.Tensor) -> torch.Tensor:
    """float64 -> the smallest float32 that is not below."""
    rounded = x.float()
    return torch.where(rounded.double() < x, torch.nextafter(rounded, torch.tensor(_INF)), rounded)


def _chunks(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[n, 1] -> the numbers of the rows where it is true, a few at a time."""
    rows = mask[:, 0].nonzero()[:, 0]
    return tuple(rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK))
