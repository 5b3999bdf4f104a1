"""Scores as a table for people: percent, with chance beside each."""

from __future__ import annotations

from collections.abc import Mapping

from .retrieval import DIRECTIONS, RANKS


def score_table(scores: Mapping[str, float], sizes: Mapping[str, tuple[int, int]]) -> str:
    """Both kinds of sets, one line per set, or per set and direction (see `Evaluation` for the keys)."""
    blocks = []
    zero_shot = [key for key in sizes if key.startswith("zero_shot/")]
    if zero_shot:
        header = ["zero-shot", "images", "classes", "per class", "plain", "chance", "largest class", "x chance"]
        rows = [_zero_shot_row(key, scores, sizes[key]) for key in zero_shot]
        blocks.append(_aligned([header, *rows]))
    retrieval = [key for key in sizes if key.startswith("retrieval/")]
    if retrieval:
        header = ["retrieval (chance)", "images", "captions", "direction", *(f"R@{k}" for k in RANKS), "x chance, R@5"]
        rows = [_retrieval_row(key, direction, scores, sizes[key]) for key in retrieval for direction in DIRECTIONS]
        blocks.append(_aligned([header, *rows]))
    return "\n\n".join(blocks)


def score_summary(scores: Mapping[str, float]) -> str:
    """One line: of each set the main score (mean per class, or R@5 of both directions) and its multiple of chance.

    scores: as `Evaluation` has them, perhaps among other values, which are left out.
    """
    parts = []
    for key, value in scores.items():
        kind, *names, metric = key.split("/")
        if len(names) != 1:
            continue  # not a whole set: one column of captions
        if kind == "zero_shot" and metric == "mean_per_class":
            name, chance = "zero-shot", scores[f"{kind}/{names[0]}/chance"]
        elif kind == "retrieval" and metric == "R5":
            name, chance = "R@5", scores[f"{key}_chance"]
        else:
            continue
        parts.append(f"{name} {names[0]} {_percent(value)} ({value / chance:.1f} x chance)")
    return "  ".join(parts)


def _zero_shot_row(key: str, scores: Mapping[str, float], size: tuple[int, int]) -> list[str]:
    names = ("mean_per_class", "accuracy", "chance", "largest_class")
    times = scores[f"{key}/mean_per_class"] / scores[f"{key}/chance"]
    return [
        key.split("/", 1)[1],
        *map(str, size),
        *(_percent(scores[f"{key}/{name}"]) for name in names),
        f"{times:.1f}",
    ]


def _retrieval_row(key: str, direction: str, scores: Mapping[str, float], size: tuple[int, int]) -> list[str]:
    values = [
        f"{_percent(scores[f'{key}/{direction}_R{k}'])} ({_percent(scores[f'{key}/{direction}_R{k}_chance'])})"
        for k in RANKS
    ]
    times = scores[f"{key}/{direction}_R5"] / scores[f"{key}/{direction}_R5_chance"]
    return [key.split("/", 1)[1], *map(str, size), direction.replace("_to_", " > "), *values, f"{times:.1f}"]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
