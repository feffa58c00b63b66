"""The sampler written the slow, obvious way, with sorts and float64: what the compiled one is held to."""

import numpy as np

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def splitmix64(start, index):
    """Number `index` (from 0) of the SplitMix64 generator that starts at `start`."""
    return mix((start + (index + 1) * STEP) & MASK)


def uniform(seed, position):
    return (splitmix64(splitmix64(seed & MASK, 0), position) >> 11) / 2**53


def penalise(logits, sampling, prompt, output):
    """Raw logits in, logits after repetition (prompt and output), frequency and presence penalties (output) out."""
    logits = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        if token < len(logits) and np.isfinite(logits[token]):
            factor = sampling.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            if token in output:
                logits[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    return logits.astype(np.float32)


def candidates(logits, sampling):
    """Probabilities [vocab] after temperature, min_p, top_k and top_p; they need not sum to 1."""
    share = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    share[share < max(sampling.min_p, 2.0**-42)] = 0
    order = np.lexsort((np.arange(len(logits)), -logits))
    if sampling.top_k > 0:
        share[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        before = np.cumsum(share[order]) - share[order]
        share[order[before >= sampling.top_p * share.sum()]] = 0
    return share


def sample(logits, sampling, seed, prompt, output):
    """The token that follows prompt and output under these logits [vocab]."""
    if np.isnan(logits).any() or logits.max() in (np.inf, -np.inf):
        return -1
    logits = penalise(logits, sampling, prompt, output)
    if sampling.temperature < 1e-5:
        return int(np.argmax(logits))
    shares = np.cumsum(candidates(logits, sampling))
    return int(np.searchsorted(shares, uniform(seed, len(output)) * shares[-1], side="right"))
