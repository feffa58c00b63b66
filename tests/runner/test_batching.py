"""Static against continuous batching on a small model: real tokens, and a clock that is given."""

from itertools import count

from millpond.core.scheduler import Scheduler
from millpond.lab.arrivals import Traffic, with_random_prompts
from millpond.lab.batchbench import BatchBench
from millpond.lab.lengths import Lengths
from tiny_llama import write_tiny_llama
from tiny_runner import tiny_runner


def test_a_model_gives_the_same_tokens_in_static_and_in_continuous_batches(tmp_path):
    write_tiny_llama(tmp_path / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32)
    runner = tiny_runner(tmp_path / "tiny.gguf")
    scheduler = Scheduler(
        num_blocks=6,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        watermark_blocks=0,
    )
    prompts, outputs = Lengths(range(3, 30), drawn=True), Lengths(range(1, 30), drawn=True)
    workload = Traffic(num_requests=12, prompt_tokens=prompts, max_tokens=outputs).requests()
    requests = with_random_prompts(workload, 200, seed=0)
    ticks = count()
    bench = BatchBench(scheduler, runner, lambda: float(next(ticks)), requests)
    static, continuous = bench.compare()
    assert static.outputs == continuous.outputs
    assert len({tuple(output) for output in static.outputs}) > 6
    assert continuous.preemptions > 0
    assert continuous.duration == 2 * len(continuous.steps) - 1
    assert len(continuous.steps) < len(static.steps)
