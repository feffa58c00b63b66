"""From a model's file to an engine: checkpoint, weights, runner, scheduler. The only module that joins both planes."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llvmlite import binding

from millpond.compiler_process import Compiler
from millpond.config import PREFIX_DIR_BYTES, EngineConfig
from millpond.core.block_pool import blocks_for_length
from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.reserve import make_reserve
from millpond.core.sizes import check_whole_prompts
from millpond.core.speculation import PromptLookup
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.engine.scheduling import make_scheduler
from millpond.errors import ConfigError, ModelFileError, shown
from millpond.kernels.attention import BLOCK
from millpond.kernels.isa import choose
from millpond.kernels.precompile import Job, compile_missing, compiling
from millpond.kernels.threads import thread_count
from millpond.load.block_file import BlockFormat
from millpond.load.gguf import GGUFFile
from millpond.load.prefix_folder import check_writable
from millpond.load.prefix_store import PrefixStore
from millpond.load.progress import Progress, ignore
from millpond.load.store import default_cache_dir, find, resolve
from millpond.machine import available_memory
from millpond.model.arrays import kv_block_bytes, kv_storage
from millpond.model.checkpoint import ModelFile, open_checkpoint
from millpond.model.config import ModelConfig
from millpond.model.packed import packed_weights
from millpond.model.pooling import CLS, LAST, MEAN, read_pooling
from millpond.model.random_weights import random_weights, random_weights_bytes
from millpond.model.weights import ModelWeights, layer_forms, linear_layers
from millpond.runner.compiled import jobs_of
from millpond.runner.model_runner import ModelRunner
from millpond.source_hash import SOURCE_FOLDERS, source_hash
from millpond.text.given_template import read_template
from millpond.text.tokenizer import Tokenizer

Notify = Callable[[str], None]
# Of the memory that is available at start, what the pool takes unless it is told otherwise.
POOL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool's size and what decided it. block_bytes counts keys and values over all layers."""

    num_blocks: int
    block_size: int
    block_bytes: int
    watermark_blocks: int
    max_model_len: int
    reason: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def position_bytes(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def plan_pool(figures: ModelConfig, config: EngineConfig, available: int) -> PoolPlan:
    """Size the pool: num_blocks, else kv_memory, else a share of the available memory in bytes, but not more than
    max_num_seqs requests of max_model_len could use, or an encoder's step. Raises ConfigError for sizes that cannot
    work."""
    if config.block_size % BLOCK:
        raise ConfigError(f"block_size must be a multiple of {BLOCK}, got {config.block_size}")
    max_model_len = config.max_model_len or figures.context_length
    if max_model_len > figures.context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model was made for at most {figures.context_length} tokens"
        )
    block_bytes = kv_block_bytes(figures, kv_storage(config.dtype, config.kv_dtype)) * (config.block_size // BLOCK)
    most = config.max_num_seqs * blocks_for_length(max_model_len, config.block_size)
    of_most = f"{config.max_num_seqs} requests of {max_model_len} tokens"
    step = config.max_num_batched_tokens // config.block_size + config.max_num_seqs  # each may leave a block unfilled
    if figures.is_encoder and step < most:
        most, of_most = step, f"a step of {config.max_num_batched_tokens} tokens"
    num_blocks, reason = _num_blocks(config, most, of_most, block_bytes, available)
    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"a pool of {num_blocks} blocks takes {num_blocks * block_bytes} bytes, but {available} are available; "
            f"give the pool less (kv_memory)"
        )
    reserve = make_reserve(num_blocks, config.block_size, config.watermark, config.watermark_blocks)
    return PoolPlan(num_blocks, config.block_size, block_bytes, reserve.blocks, max_model_len, reason)


def _num_blocks(config: EngineConfig, most: int, of_most: str, block_bytes: int, available: int) -> tuple[int, str]:
    if config.num_blocks is not None:
        return config.num_blocks, "asked for"
    if config.kv_memory is not None:
        if config.kv_memory < block_bytes:
            raise ConfigError(f"kv_memory is {config.kv_memory} bytes, but one block takes {block_bytes}")
        return config.kv_memory // block_bytes, "kv_memory"
    share = int(POOL_SHARE * available) // block_bytes
    if share < 1:
        raise ConfigError(f"{available} bytes of memory are available, too few for one block of {block_bytes}")
    if share < most:
        return share, f"{POOL_SHARE:.0%} of the available memory"
    return most, of_most


def build_engine(
    model: str | Path,
    config: EngineConfig | None = None,
    *,
    notify: Notify = lambda line: None,
    cache_dir: Path | None = None,
    progress: Progress = ignore,
    chat_template: str | None = None,
    compiler: Compiler | None = None,
    **engine_options: Any,
) -> Engine:
    """An engine that is ready to serve: weights packed or read as they were packed before, pool allocated, kernels
    compiled or loaded.

    model is a known name, a file, a folder or org/repo[:file]. cache_dir, where packed weights are kept, is the user's
    cache folder unless given. progress hears of weights that are being packed. chat_template, a template or its file,
    takes the place of the model's own. compiler: a process that has been started to compile. engine_options go to
    Engine (clock, observer).
    Raises ModelNotFoundError, ModelFileError, DownloadError or ConfigError.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(f"model must be a name or a path, got {shown(model)}")
    model = str(model)
    template = None if chat_template is None else read_template(chat_template)
    if find(model) is None:
        notify(f"fetching {model} ...")
    path = resolve(model)
    file, figures = open_checkpoint(path)
    pooling = find_pooling(file, figures, notify)
    tokenizer = read_tokenizer(file)
    if template is not None:
        tokenizer = tokenizer.with_chat_template(template)
    config, plan = _settle(figures, config or EngineConfig())
    if config.prefix_dir is not None:
        check_writable(config.prefix_dir)
    runner = _build_runner(
        file, figures, config, plan, tokenizer.vocab_size, cache_dir, notify, progress, pooling or LAST, compiler
    )
    scheduler = make_scheduler(
        config,
        drafter=PromptLookup(config.speculative_tokens) if config.speculative == "ngram" else None,
        disk=None if config.prefix_dir is None else open_disk(config.prefix_dir, file.paths, config, runner),
        whole_prompts=figures.is_encoder,
    )
    return Engine(
        config=config,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        model_name=name_of(path) if Path(model).exists() else model,
        vocab_size=tokenizer.vocab_size,
        embedding_size=0 if pooling is None else figures.hidden_size,
        **engine_options,
    )


def find_pooling(file: ModelFile, figures: ModelConfig, notify: Notify) -> str | None:
    """How the model makes an embedding of its hidden states, None where it makes none. ModelFileError for an encoder
    that does not say, or whose way is not supported: it can do nothing else."""
    pooling: str | None = read_pooling(file)
    supported = (MEAN, CLS, LAST) if figures.is_encoder else (LAST,)
    if pooling in supported:
        return pooling
    known = ", ".join(map(repr, supported))
    if figures.is_encoder:
        says = "does not say how it makes embeddings" if pooling is None else f"makes its embeddings by {pooling!r}"
        key = "pooling_type" if isinstance(file, GGUFFile) else "1_Pooling/config.json"
        raise ModelFileError(f"{file.path.name}: this encoder {says}; supported are {known}, by {key}")
    if pooling is not None:
        notify(f"this model makes its embeddings by {pooling!r}, which is not supported ({known} is): it gives none")
    return None


def name_of(path: Path) -> str:
    """What a model is called that has no other name: its file without the ending, or its folder."""
    folder = path.parent if path.suffix == ".safetensors" else path
    return folder.resolve().name if folder.is_dir() else path.stem


def read_tokenizer(file: ModelFile) -> Tokenizer:
    """The tokenizer that a GGUF file carries, or that lies beside a safetensors file."""
    return Tokenizer.from_gguf(file.metadata) if isinstance(file, GGUFFile) else Tokenizer.from_folder(file.path.parent)


def open_disk(
    folder: Path, model: Sequence[Path], config: EngineConfig, runner: ModelRunner, clock: Clock = time.monotonic
) -> DiskPrefixes:
    """The prefixes of a model, known by its files, that a folder keeps. config is the engine's, its sizes filled in.

    Raises ConfigError for a folder that cannot be had or written to.
    """
    form = BlockFormat(_identity(model, runner.config, config), config.block_size, runner.block_bytes)
    most_bytes = config.prefix_dir_size or PREFIX_DIR_BYTES
    store = PrefixStore(folder, form, most_bytes=most_bytes, read_block=runner.read_block, clock=clock)
    return DiskPrefixes(store, config.block_size, clock)


def _identity(model: Sequence[Path], figures: ModelConfig, config: EngineConfig) -> bytes:
    """A digest of all that the bits of K/V depend on: the model, how it is computed, the code, and the processor that
    the code is compiled for."""
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    code = source_hash((*SOURCE_FOLDERS, "load"))
    content = []
    for path in model:
        with path.open("rb") as source:
            content.append(hashlib.file_digest(source, "sha256").hexdigest())
    how = config.dtype, config.quantize, config.kv_type, config.isa, config.block_size
    parts = content, figures, how, code, *processor
    return hashlib.sha256(repr(parts).encode()).digest()


def build_model_runner(path: Path, config: EngineConfig | None = None, *, cache_dir: Path | None = None) -> ModelRunner:
    """The runner alone, for evaluation and tests; its pool holds max_model_len positions unless sized by the config."""
    config = config or EngineConfig()
    file, figures = open_checkpoint(Path(path))
    if figures.is_encoder:
        raise ConfigError(f"{name_of(Path(path))} makes embeddings: it has no logits to be evaluated")
    if config.num_blocks is None and config.kv_memory is None:
        longest = config.max_model_len or figures.context_length
        config = dataclasses.replace(config, num_blocks=blocks_for_length(longest, config.block_size))
    config, plan = _settle(figures, config)
    return _build_runner(file, figures, config, plan, figures.vocab_size, cache_dir, lambda line: None)


def build_random_runner(figures: ModelConfig, config: EngineConfig) -> ModelRunner:
    """A runner of random weights, for measuring. Raises ConfigError where the memory is too small for them."""
    needed, available = random_weights_bytes(figures, config.dtype), available_memory()
    if needed > available:
        raise ConfigError(f"the weights take {needed} bytes, but {available} are available")
    weights = random_weights(figures, config.dtype)
    config, plan = _settle(figures, config)
    compile_missing(_jobs(figures, weights.kinds, config), lambda line: None)
    return _new_runner(figures, weights, config, plan, figures.vocab_size)


def _settle(figures: ModelConfig, config: EngineConfig) -> tuple[EngineConfig, PoolPlan]:
    """The config with its open sizes filled in, and the pool that they make."""
    plan = plan_pool(figures, config, available_memory())
    if figures.is_encoder:
        config = for_whole_prompts(config, plan.max_model_len)
    settled = dataclasses.replace(
        config,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        kv_memory=plan.num_bytes,
        threads=thread_count(config.threads),
        isa=choose(config.isa),
    )
    return settled, plan


def for_whole_prompts(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The settings of an encoder, which reads each prompt whole and generates nothing. Raises ConfigError for what it
    would have to ignore, and where a prompt might not fit a step."""
    for name, off, why in (
        ("prefix_dir", None, "every token sees the whole prompt, so no prefix can be kept"),
        ("itl_target", None, "nothing is generated beside the prompts"),
        ("speculative", "off", "nothing is generated"),
    ):
        if getattr(config, name) != off:
            raise ConfigError(f"{name} is of no use with this model: {why}; leave it out")
    check_whole_prompts(max_model_len, config.max_num_batched_tokens, drafts=False, finds_prefixes=False)
    return dataclasses.replace(config, prefix_cache=False)


def _build_runner(
    file: ModelFile,
    figures: ModelConfig,
    config: EngineConfig,
    plan: PoolPlan,
    vocab_size: int,
    cache_dir: Path | None,
    notify: Notify,
    progress: Progress = ignore,
    pooling: str = LAST,
    compiler: Compiler | None = None,
) -> ModelRunner:
    if vocab_size > figures.vocab_size:
        raise ModelFileError(
            f"{file.path.name}: the tokenizer has {vocab_size} tokens, but the embedding only {figures.vocab_size} rows"
        )
    folder = (cache_dir or default_cache_dir()) / "packed"
    forms = layer_forms(file, linear_layers(file, figures), config.dtype, config.quantize)
    with compiling(_jobs(figures, {form.kind for form in forms}, config), notify, compiler):
        weights, keep = packed_weights(
            file,
            figures,
            config.dtype,
            config.kv_dtype,
            isa=config.isa,
            folder=folder,
            notify=notify,
            quantize=config.quantize,
            progress=progress,
        )
    runner = _new_runner(figures, weights, config, plan, vocab_size, pooling)
    keep(runner.outliers)
    return runner


def _jobs(figures: ModelConfig, kinds: Iterable[int], config: EngineConfig) -> list[Job]:
    jobs: list[Job] = jobs_of(figures, kinds, kv_storage(config.dtype, config.kv_dtype), config.isa)
    return jobs


def _new_runner(
    figures: ModelConfig,
    weights: ModelWeights,
    config: EngineConfig,
    plan: PoolPlan,
    vocab_size: int,
    pooling: str = LAST,
) -> ModelRunner:
    runner = ModelRunner(
        figures,
        weights,
        isa=config.isa,
        threads=thread_count(config.threads),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        max_drafts=0 if config.speculative == "off" else config.speculative_tokens,
        pooling=pooling,
    )
    runner.warm_up()
    return runner
