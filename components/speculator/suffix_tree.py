"""Counts of all substrings of some texts, up to a depth: a suffix tree in the compact form of a suffix automaton.

A node stands for all substrings that end at the same places; its link leads to the longest suffix of them that ends
elsewhere too. A text of n tokens makes at most 2 n nodes; a token costs O(depth) at worst, a few steps on most texts.
Texts cannot be taken out again: who wants to forget drops the tree.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixTree:
    """Texts are appended one after the other; what crosses from one to the next is no substring."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: list[dict[int, int]] = [{}]
        self.links = [ROOT]
        self.lengths = [0]  # of a node's longest substring
        self.counts = [0]  # how often a node's substrings of at most `depth` tokens stand in the texts
        self.start()

    def start(self) -> None:
        """A new text begins."""
        self._last = ROOT
        self.end = Cursor(self, self.depth)  # the longest suffix of the text so far

    def append(self, token: int) -> None:
        """One more token of the text."""
        self._last = self._extended(token)
        self.end.feed(token)
        node, counts, links = self.end.node, self.counts, self.links
        while node != ROOT:
            counts[node] += 1
            node = links[node]

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens of the text."""
        for token in tokens:
            self.append(token)

    def _extended(self, token: int) -> int:
        """The node of the whole text with the token behind it."""
        children, links, lengths = self.children, self.links, self.lengths
        last = self._last
        if (known := children[last].get(token)) is not None:  # an earlier text began like this one
            return known if lengths[known] == lengths[last] + 1 else self._split(last, known, token)
        new = self._new({}, lengths[last] + 1, 0)
        node = last
        while token not in children[node]:
            children[node][token] = new
            if node == ROOT:
                return new  # its link is the root
            node = links[node]
        known = children[node][token]
        links[new] = known if lengths[known] == lengths[node] + 1 else self._split(node, known, token)
        return new

    def _split(self, node: int, known: int, token: int) -> int:
        """The short substrings of `known`, up to those of `node` with the token behind, get a node of their own."""
        children, links = self.children, self.links
        short = self._new(children[known].copy(), self.lengths[node] + 1, self.counts[known])
        links[short], links[known] = links[known], short
        while children[node].get(token) == known:
            children[node][token] = short
            if node == ROOT:
                break
            node = links[node]
        return short

    def _new(self, children: dict[int, int], length: int, count: int) -> int:
        self.children.append(children)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def continuation(self, node: int, at_most: int, least: float) -> tuple[list[int], float]:
        """The likeliest tokens behind a node's substrings, one after the other, and the sum of their probabilities.

        A token's probability is that of the whole path to it; one below `least` ends the path.
        """
        children, counts = self.children, self.counts
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < at_most and (ways := children[node]):
            token = max(ways, key=lambda token: counts[ways[token]])  # of equal ones the first that was seen
            following = ways[token]
            probability *= counts[following] / counts[node]
            if probability < least:
                break
            tokens.append(token)
            score += probability
            node = following
        return tokens, score


class Cursor:
    """The longest suffix of what it was fed, of at most `limit` tokens, that is a substring of a tree."""

    def __init__(self, tree: SuffixTree, limit: int) -> None:
        self.tree = tree
        self._limit = limit
        self.node = ROOT
        self.length = 0

    def feed(self, token: int) -> None:
        """One more token."""
        children, links, lengths = self.tree.children, self.tree.links, self.tree.lengths
        node, length = self._settled(), self.length
        while (following := children[node].get(token)) is None:
            if node == ROOT:
                self.node, self.length = ROOT, 0
                return
            node = links[node]
            length = lengths[node]
        self.node, self.length = following, min(length + 1, self._limit)
        self.node = self._settled()

    def _settled(self) -> int:
        """The node, unless it was split meanwhile, or stands for nothing as short as the limit."""
        links, lengths, node = self.tree.links, self.tree.lengths, self.node
        while node != ROOT and self.length <= lengths[links[node]]:
            node = links[node]
        return node

    def suffixes(self) -> Iterable[tuple[int, int]]:
        """(node, length of its longest substring) of what was fed last, longest first; shorter ones of a node have the
        same continuations."""
        node, length = self._settled(), self.length
        while node != ROOT:
            yield node, length
            node = self.tree.links[node]
            length = self.tree.lengths[node]
