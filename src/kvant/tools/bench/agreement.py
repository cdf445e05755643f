"""Whether engines that read the same prompt wrote the same tokens."""

from kvant.tools.bench.recording import Recording


def agreement(recording: Recording) -> str | None:
    """A sentence on every engine's runs against the baseline's of the same round; None where there is none to compare.

    Greedy tokens of one model differ where rounding decides between two that are as likely; a quantized cache, or
    other dtypes, round more.
    """
    baseline = recording.header.baseline
    known = {(run.engine, run.run, run.context): run.token_ids for run in recording.runs if run.token_ids is not None}
    pairs: dict[str, list[bool]] = {}
    for (label, number, context), ids in known.items():
        others = known.get((baseline or "", number, context))
        if label != baseline and others is not None:
            pairs.setdefault(label, []).append(ids == others)
    if not pairs:
        return None
    counts = ", ".join(f"{label} in {sum(same)} of {len(same)}" for label, same in pairs.items())
    return f"Runs with the same tokens as {baseline}: {counts}."
