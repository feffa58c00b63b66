"""What a step calls that is compiled, for a model of these figures: known before there are weights."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from millpond.kernels.attention import BLOCK
from millpond.kernels.precompile import Job, Wanted
from millpond.kernels.tiles import Tiles, load_tiles
from millpond.model.arrays import new_kv_cache, new_scratch, no_batch, no_weights
from millpond.model.config import ModelConfig
from millpond.model.encoder import walk_of
from millpond.model.experts import link_ffn
from millpond.model.forward import link_attention, link_forward
from millpond.runner.sampler import link_compiled


def jobs_of(config: ModelConfig, kinds: Iterable[int], kv_dtype: type[np.generic], isa: str) -> list[Job]:
    """Everything that a step of such a model calls, the longest to compile first; kinds are those of its weights."""
    small, large = Wanted(), Wanted()
    tiles = tile_loader(config, kinds, kv_dtype, isa, 1)(link=small)
    cache = new_kv_cache(config, 1, kv_dtype)
    scratch = new_scratch(config, kv_dtype, rows=1, sampled=1, max_model_len=BLOCK, threads=1)
    weights = no_weights(config)
    arguments = tiles, weights, cache, no_batch(), scratch
    link_forward(walk_of(config), *arguments, link=large)
    link_attention(*arguments, link=large)
    if not config.is_encoder:
        link_ffn(tiles, weights, scratch, link=large)
        link_compiled(large)
    return large.jobs() + small.jobs()


def tile_loader(
    config: ModelConfig, kinds: Iterable[int], kv_dtype: type[np.generic], isa: str, threads: int
) -> Callable[..., Tiles]:
    """What loads the tiles that a model needs."""
    return partial(
        load_tiles,
        isa,
        threads,
        kinds=kinds,
        kv_dtype=kv_dtype,
        heads_per_kv=config.heads_per_kv,
        head_dim=config.head_dim,
        windowed=config.has_windows,
        capped=config.score_cap > 0,
        gate=None if config.is_encoder or config.num_experts else config.block.activation,
    )
