"""Attention over a paged cache, whole and in float64, and steps of requests whose blocks lie scattered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.attention.work import Work
from dcpjax.models.kv_cache import CacheGeometry
from dcpjax.runtime.batch import ShapeBuckets, build
from dcpjax.sharding.merge import Partial


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention of q [N, H, D] over visible k, v [S, K, D] -> out [N, H, D], lse [N, H]."""
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // k.shape[1]
    for token, head in np.ndindex(*q.shape[:2]):
        seen = mask[token]
        if seen.any():
            scores = k[seen, head // group].astype(np.float64) @ q[token, head].astype(np.float64)
            shares = np.exp(scores - scores.max())
            lse[token, head] = scores.max() + np.log(shares.sum())
            out[token, head] = shares @ v[seen, head // group].astype(np.float64) / shares.sum()
    return out, lse


def request(number: int, tokens: int) -> Request:
    ids = list(range(tokens))
    return Request(number=number, prompt_token_ids=ids, params=SamplingParams(), max_tokens=1)


HEADS, KV_HEADS, HEAD_DIM = 6, 2, 48  # three query heads to a KV head; features in pieces of 32 and 16


ROWS, TOKENS = 5, 128


TOLERANCE = 2e-5


Span = tuple[int, int]  # tokens computed before, tokens in this step


@dataclass(frozen=True)
class Paging:
    geometry: CacheGeometry
    context: int

    @property
    def blocks(self) -> int:
        """Of one request: whole chunks, as the real table has."""
        chunk_blocks = self.geometry.chunk_blocks
        return -(-self.geometry.blocks(self.context) // chunk_blocks) * chunk_blocks

    def __str__(self) -> str:
        return f"{self.geometry.block_size}-{self.geometry.dcp}-{self.geometry.interleave}"


def paging(block_size: int, dcp: int, interleave: int, context: int) -> Paging:
    return Paging(CacheGeometry(block_size=block_size, dcp=dcp, interleave=interleave), context)


def scheduled(step: Sequence[Span], where: Paging) -> Work:
    """Every request's blocks lie scattered over the pool, none shared."""
    pool = np.random.default_rng(7).permutation(ROWS * where.blocks).reshape(ROWS, -1).tolist()
    entries = [
        Scheduled(request(row, start + count), start, count, pool[row][: where.geometry.blocks(start + count)], True)
        for row, (start, count) in enumerate(step)
    ]
    shapes = ShapeBuckets(max_rows=ROWS, max_tokens=TOKENS, table_width=where.blocks)
    return build(entries, shapes, where.geometry).work


def live(work: Work) -> np.ndarray:
    """[R]: positions that each row has after the step."""
    rows = np.arange(len(work.block_table))
    return np.max(np.where(rows[:, None] == work.rows, work.positions, -1), axis=1) + 1


def assert_close(found: Partial, expected: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found.out, expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.lse, expected[1], rtol=tolerance, atol=tolerance)


def whole(work: Work, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention of every token of the step, by positions, without blocks or ranks."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row in np.unique(np.asarray(work.rows)):
        (mine,) = np.nonzero(np.asarray(work.rows) == row)
        seen = np.arange(keys.shape[1])[None, :] <= np.asarray(work.positions)[mine, None]
        out[mine], lse[mine] = dense(q[mine], keys[row], values[row], seen)
    return out, lse


def spans(where: Paging) -> list[Span]:
    """Decodes at the edges of blocks and at the end, prompts of more and of less than a tile; 24 tokens in all."""
    size = where.geometry.block_size
    return [(where.context - 1, 1), (size - 1, 1), (size, 1), (where.context - 20, 18), (0, 3)]
