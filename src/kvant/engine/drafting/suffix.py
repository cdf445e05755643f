"""Drafts from the text itself: what followed when the last tokens occurred before."""

from collections.abc import Sequence

from kvant.engine.drafting.choice import Drafter

MOST_TOKENS = 65_536
RENEWED = 8  # suffixes of which a new token becomes the latest place: a bound, for a text of one token repeated


class SuffixDrafter(Drafter):
    """A suffix automaton of prompt and answer (Blumer et al. 1985): the longest suffix that occurred before.

    A token takes amortized constant time and about 0.45 kB. At ``most_tokens`` the older half is forgotten, and the
    newer one read again.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """``most_tokens``: tokens that are remembered, at least 2."""
        self._most = most_tokens
        self._clear()

    def _clear(self) -> None:
        self.match = 0
        self._tokens: list[int] = []
        # Of each state: transitions, suffix link, longest length, and the place where it ended last.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._place = [-1]
        self._last = 0
        self._follows = 0  # the place of the token that followed the match

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens[-self._most :]:
            if len(self._tokens) == self._most:
                kept = self._tokens[self._most // 2 :]
                self._clear()
                for each in kept:
                    self._add(each)
            self._add(token)

    def _add(self, token: int) -> None:
        transitions, link, length, place = self._next, self._link, self._length, self._place
        here = len(self._tokens)
        self._tokens.append(token)
        state, new = self._last, len(transitions)
        transitions.append({})
        length.append(length[state] + 1)
        place.append(here)
        link.append(0)
        while state != -1 and token not in transitions[state]:
            transitions[state][token] = new
            state = link[state]
        suffix = 0 if state == -1 else transitions[state][token]
        if state != -1 and length[state] + 1 != length[suffix]:
            found, suffix = suffix, new + 1  # a state for the shorter strings of the one that was found
            transitions.append(dict(transitions[found]))
            length.append(length[state] + 1)
            place.append(place[found])
            link.append(link[found])
            while state != -1 and transitions[state].get(token) == found:
                transitions[state][token] = suffix
                state = link[state]
            link[found] = suffix
        link[new] = suffix
        self._last = new
        self.match, self._follows = length[suffix], place[suffix] + 1
        for _ in range(RENEWED):
            if suffix <= 0:
                break
            place[suffix] = here
            suffix = link[suffix]

    def propose(self, count: int) -> list[int]:
        """Tokens that may follow, none without a match. A copy that reaches the end goes on with itself."""
        if not self.match:
            return []
        period = len(self._tokens) - self._follows
        draft = self._tokens[self._follows : self._follows + count]
        while len(draft) < count:
            draft.append(draft[-period])
        return draft
