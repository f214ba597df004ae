"""The prefix tree: KV pages of finished or running prompts, found again by their tokens.

A radix tree over whole pages. An edge holds the tokens of one or more pages and those pages; children
are found by the tuple of their first page's tokens. Lookups compare the tokens themselves (never a hash
alone, and no hash leaves the process), so a match is always KV of exactly these tokens. Pure Python:
the simulator drives the same code.

Each prompt has a salt (0: none) and finds only pages of prompts with the same one, because it is part of the
key of the root's children. So clients that must not learn each other's prompts share nothing.

Recency is an order, not a clock: `_recent` lists the nodes from least to most recently used, and every
touch moves a path to the end, leaf first. So a node always stands behind its descendants, and one pass
from the front meets leaves before the parents they uncover.

How many pages could be evicted is asked at every admission, so it is kept, not counted: each node knows its
`loose` pages, and is looked at again when the pool says that a page has a second lease, or has it no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from segue.engine.pages import PagePool
from segue.kv import Internal, OutOfCapacity

#: When pages are missing, at least one in so many of the pool is evicted: evicted one by one they come back
#: from anywhere, and no sequence has two neighbours.
EVICTED_SHARE = 16


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a sequence: `pages`, leased to the caller, hold its first `tokens` tokens."""

    pages: list[int]
    tokens: int


@dataclass(slots=True, eq=False)
class _Node:
    tokens: tuple[int, ...]
    pages: list[int]
    parent: _Node | None
    #: its place among its parent's children
    key: tuple[int, ...]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    #: children that cannot be evicted whole
    blocked: int = 0
    #: pages at the end that could be evicted now, after all children
    loose: int = 0

    @property
    def whole(self) -> bool:
        return self.loose == len(self.pages)


class Journal(Protocol):
    """Gets the pages that the tree takes and gives back."""

    def stored(self, pages: Sequence[int], after: int | None, tokens: Sequence[int], salt: int) -> None:
        """The tree has taken `pages`, which hold `tokens` and follow the page `after`, or begin a sequence of
        `salt`."""
        ...

    def removed(self, pages: Sequence[int]) -> None:
        """The tree has given `pages` back."""
        ...

    def cleared(self) -> None:
        """The tree has given all pages back."""
        ...


def _root_key(first: tuple[int, ...], salt: int) -> tuple[int, ...]:
    """The root's key for a child that begins with `first`; no two salts share a key."""
    return (salt, *first) if salt else first


class PrefixTree:
    """Caches pages of `pool` by the tokens whose KV they hold; holds one lease of its own on each.

    One thread only. Only whole pages are kept: a tail shorter than `page_tokens` is ignored.
    """

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        if page_tokens != pool.page_tokens:
            raise ValueError(f"the tree's pages have {page_tokens} tokens, the pool's {pool.page_tokens}")
        self._pool = pool
        self._page_tokens = page_tokens
        self._root = _Node((), [], None, ())
        self._recent: OrderedDict[_Node, None] = OrderedDict()
        self._pages = 0
        self._evictable = 0
        #: the node of each page in the tree
        self._node_of: dict[int, _Node] = {}
        if pool.watch is not None:
            raise ValueError("the pool has a prefix tree already")
        pool.watch = self._leases_changed
        self.journal: Journal | None = None

    @property
    def pages(self) -> int:
        """Pages that the tree holds a lease on."""
        return self._pages

    # --- lookup -------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: int = 0) -> PrefixMatch:
        """The longest cached prefix of `tokens` in whole pages, of those that came with this `salt`.

        The caller gets a lease on each page and releases it through the pool. To leave a token to
        compute (a forward needs one), pass `tokens[:-1]`.
        """
        node, partial, pages = self._walk(tuple(tokens), salt)
        self._touch(partial or node)
        self._pool.share(pages)
        found = len(pages) * self._page_tokens
        return PrefixMatch(pages, found)

    def peek(self, tokens: Sequence[int], salt: int = 0) -> int:
        """How many tokens `match` would find; takes no lease and leaves recency alone."""
        return len(self._walk(tuple(tokens), salt)[2]) * self._page_tokens

    def _walk(self, tokens: tuple[int, ...], salt: int) -> tuple[_Node, _Node | None, list[int]]:
        """Follow `tokens`: the deepest node matched whole, the child matched in part, and the pages."""
        size = self._page_tokens
        node, at, pages = self._root, 0, list[int]()
        while at + size <= len(tokens):
            first = tokens[at : at + size]
            child = node.children.get(first if at else _root_key(first, salt))
            if child is None:
                break
            if tokens[at : at + len(child.tokens)] == child.tokens:
                pages += child.pages
                at += len(child.tokens)
                node = child
                continue
            same = self._common_pages(child, tokens, at)
            pages += child.pages[:same]
            return node, child, pages
        return node, None, pages

    def _common_pages(self, node: _Node, tokens: tuple[int, ...], at: int) -> int:
        size = self._page_tokens
        same = 1  # the child was found by its first page
        while (
            node.tokens[same * size : (same + 1) * size] == tokens[at + same * size : at + (same + 1) * size]
        ):
            same += 1
        return same

    def _touch(self, node: _Node) -> None:
        """Make `node` and its ancestors the most recently used, leaf first."""
        while node.parent is not None:
            self._recent[node] = None
            self._recent.move_to_end(node)
            node = node.parent

    # --- insertion ----------------------------------------------------------------------------

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: int = 0) -> int:
        """Remember that `pages` hold the KV of `tokens`, whole pages only, for prompts of this `salt`.

        The tree takes its own lease on pages whose tokens it does not have yet; where it has them
        already its own page stays and the caller's is left alone. The caller keeps its leases either
        way. Returns the number of pages added.
        """
        size = self._page_tokens
        whole = min(len(tokens) // size, len(pages))
        key = tuple(tokens[: whole * size])
        node, partial, known = self._walk(key, salt)
        new = list(pages[len(known) : whole])
        self._pool.share(new)
        if partial is not None:
            same = len(known) - self._depth(node)
            if new:
                node = self._split(partial, same)
            else:
                node = partial
        if new:
            rest = key[len(known) * size :]
            leaf = _Node(rest, new, node, rest[:size] if known else _root_key(rest[:size], salt))
            node.children[leaf.key] = leaf
            self._node_of.update(dict.fromkeys(new, leaf))
            node.blocked += 1  # nothing of the leaf is loose yet
            self._look_again(node)
            self._look_again(leaf)
            self._pages += len(new)
            node = leaf
            if self.journal is not None:
                self.journal.stored(new, known[-1] if known else None, leaf.tokens, salt)
        self._touch(node)
        return len(new)

    def _depth(self, node: _Node) -> int:
        """Pages from the root to the end of `node`."""
        depth = 0
        while node.parent is not None:
            depth += len(node.pages)
            node = node.parent
        return depth

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut `node` after `count` pages; returns the new upper half. The caller touches it."""
        assert node.parent is not None
        size = self._page_tokens
        upper = _Node(node.tokens[: count * size], node.pages[:count], node.parent, node.key)
        node.parent.children[upper.key] = upper
        node.tokens, node.pages, node.parent = node.tokens[count * size :], node.pages[count:], upper
        node.key = node.tokens[:size]
        upper.children[node.key] = node
        self._node_of.update(dict.fromkeys(upper.pages, upper))
        upper.loose = max(0, node.loose - len(node.pages))
        node.loose -= upper.loose
        upper.blocked = 0 if node.whole else 1
        return upper

    # --- eviction -----------------------------------------------------------------------------

    def evict(self, pages_wanted: int) -> int:
        """Give up to `pages_wanted` pages back to the pool, least recently used first, tails first.

        Only pages that nobody else leases go. Returns how many went.
        """
        victims: list[tuple[_Node, int]] = []
        count = 0
        for node in self._recent:  # descendants first, and a parent has nothing loose before all of them are
            if count >= pages_wanted:
                break
            loose = min(node.loose, pages_wanted - count)
            if not loose:
                continue
            victims.append((node, loose))
            count += loose
        for node, loose in victims:
            self._cut(node, loose)
        return count

    def _loose_tail(self, node: _Node) -> int:
        """How many pages at the end of `node` only the tree leases."""
        references = self._pool.references
        loose = 0
        for page in reversed(node.pages):
            if references(page) != 1:
                break
            loose += 1
        return loose

    def _cut(self, node: _Node, count: int) -> None:
        """Drop the last `count` pages of the leaf `node`, and the node itself with its last one."""
        assert node.parent is not None
        size = self._page_tokens
        kept = len(node.pages) - count
        gone = node.pages[kept:]
        for page in gone:
            del self._node_of[page]
        node.loose -= count
        self._evictable -= count
        if kept:
            node.pages, node.tokens = node.pages[:kept], node.tokens[: kept * size]
        else:
            del node.parent.children[node.key]
            del self._recent[node]
        self._pages -= count
        if self.journal is not None:
            self.journal.removed(gone)
        self._pool.release(gone)

    @property
    def evictable(self) -> int:
        """Pages that `evict` could give back now."""
        return self._evictable

    def _leases_changed(self, pages: Sequence[int]) -> None:
        """Somebody else than the tree leases `pages` now, or no longer."""
        last = None
        for page in pages:
            node = self._node_of.get(page)
            if node is not None and node is not last:  # neighbours in a sequence are neighbours in a node
                self._look_again(node)
                last = node

    def _look_again(self, node: _Node) -> None:
        """Count what of `node` is loose, and of its parent, if it blocks that no longer or from now on."""
        while node.parent is not None:
            loose, was_whole = 0 if node.blocked else self._loose_tail(node), node.whole
            self._evictable += loose - node.loose
            node.loose = loose
            if node.whole == was_whole:
                return
            node.parent.blocked += -1 if node.whole else 1
            node = node.parent

    def clear(self) -> int:
        """Forget everything and end all of the tree's leases; returns how many pages it had."""
        count = self._pages
        self._node_of.clear()
        self._evictable = self._root.blocked = 0
        for node in self._recent:
            self._pool.release(node.pages)
        self._root.children.clear()
        self._recent.clear()
        self._pages = 0
        if self.journal is not None:
            self.journal.cleared()
        return count

    def runs(self) -> Iterator[tuple[Sequence[int], int | None, Sequence[int], int]]:
        """Pages that lie behind one another in a node, the page before them if there is one, their tokens,
        and without a page before them their salt; parents before children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            assert node.parent is not None
            salt = node.key[0] if len(node.key) > self._page_tokens else 0
            yield node.pages, node.parent.pages[-1] if node.parent.pages else None, node.tokens, salt
            stack += node.children.values()

    # --- integrity ----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Verify shape, order and leases; O(pages). Raises Internal on a contradiction."""
        order = {node: place for place, node in enumerate(self._recent)}
        seen: set[int] = set()
        count = nodes = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                size = self._page_tokens
                place = first if node is not self._root else first[-size:]
                if child.parent is not node or child.key != first or child.tokens[:size] != place:
                    raise Internal("a node of the prefix tree hangs under the wrong parent or key")
                if not child.pages or len(child.tokens) != len(child.pages) * self._page_tokens:
                    raise Internal(f"a node has {len(child.tokens)} tokens in {len(child.pages)} pages")
                if child not in order or (node in order and order[node] < order[child]):
                    raise Internal("a node of the prefix tree is out of its order of use")
                if any(self._node_of.get(page) is not child for page in child.pages):
                    raise Internal("a page of the prefix tree is looked for in another node")
                nodes += 1
                count += len(child.pages)
                seen.update(child.pages)
                stack.append(child)
        if (nodes, count, count) != (len(order), self._pages, len(seen)):
            raise Internal(
                f"the prefix tree counts {self._pages} pages in {len(order)} nodes, has {count} in {nodes}"
            )
        if any(self._pool.references(page) < 1 for page in seen):
            raise Internal("the prefix tree holds a page that is free")
        loose = self._recount()
        if (loose, count) != (self._evictable, len(self._node_of)):
            raise Internal(
                f"the prefix tree counts {self._evictable} pages to evict, recounted {loose}; "
                f"it finds {len(self._node_of)} of {count} pages"
            )

    def _recount(self) -> int:
        """The value of `evictable`, counted from the leases alone."""
        blocked: set[_Node] = set()
        total = 0
        for node in self._recent:  # descendants first, see the module's docstring
            loose = 0 if node in blocked else self._loose_tail(node)
            total += loose
            if loose < len(node.pages) and node.parent is not None:
                blocked.add(node.parent)
        return total


def allocate_evicting(
    pool: PagePool, tree: PrefixTree, n: int, after: int | None = None, room: int | None = None
) -> list[int]:
    """`pool.allocate`, after giving back cached pages if some are missing: more than those, so that what
    comes back lies together.

    OutOfCapacity if even that is not enough; the cache is then left as it was.
    """
    missing = n - pool.free
    if missing > 0:
        if tree.evictable < missing:
            raise OutOfCapacity(
                f"{n} pages wanted, {pool.free} of {pool.total} free, {tree.evictable} more can be evicted",
                phase="allocate",
            )
        tree.evict(max(missing, pool.total // EVICTED_SHARE))
    return pool.allocate(n, after, room)
