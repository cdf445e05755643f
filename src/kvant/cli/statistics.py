"""Format the statistics of a run: counts, times and memory."""

from dataclasses import dataclass, field

from kvant.cli.session import Session
from kvant.engine.stream import GenerationResponse
from kvant.sizes import format_bytes
from kvant.tools.statistics import percentile


@dataclass(slots=True)
class RunStatistics:
    latencies_ms: list[float] = field(default_factory=list)
    last: GenerationResponse | None = None

    def add(self, response: GenerationResponse) -> None:
        self.latencies_ms.append(response.latency_ms)
        self.last = response

    def cut(self, max_tokens: int, session: Session) -> str | None:
        """Return what cut the text off, or None."""
        reason = None if self.last is None else self.last.finish_reason
        if reason == "length":
            return f"cut at --max-tokens {max_tokens}"
        if reason != "context":
            return None
        if session.reserved == session.model.config.max_position_embeddings:
            return "cut: the model's context is full"
        return "cut: the reserved context is full; --max-kv-size reserves more"

    def lines(self, session: Session, *, is_single: bool = True) -> list[str]:
        """Return the statistics as lines; drafts are shown only for a single answer."""
        if self.last is None:
            return ["nothing was generated"]
        last = self.last
        first_ms, *later = self.latencies_ms
        lines = [
            f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s",
            f"generated: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s, "
            f"ended by {last.finish_reason or 'interruption'}",
            f"first token: {first_ms / 1e3:.3f} s, after {session.load_s:.2f} s of loading",
        ]
        if later and last.drafts is not None:
            # A median would be of tokens that arrived together.
            latency = f"latency: {sum(later) / len(later):.2f} ms a token"
            lines.append(
                f"{latency}, {last.drafts.tokens_a_step:.2f} tokens a step" if is_single else latency
            )
            lines += [last.drafts.describe()] if is_single else []
        elif later:
            median, p95 = (percentile(later, percent) for percent in (50, 95))
            lines.append(f"latency: median {median:.2f} ms, p95 {p95:.2f} ms a token")
        lines += session.arrangement.describe(session.model)
        lines.append(f"peak memory: {format_bytes(round(last.peak_memory * 1e9))}")
        return lines
