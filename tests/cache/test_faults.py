"""Does the state machine see what it should? One wrong line at a time is put into the cache, and it must fail."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from decodekit.cache.allocator import Allocator
from decodekit.cache.blocks import BlockPool
from decodekit.cache.host import GroupHost, HostTier
from decodekit.cache.prefix import PrefixIndex
from decodekit.testing.mutants import Mutant, planted
from tests.cache.interrupts import Interrupted
from tests.cache.machine import SEARCH, PoolMachine


class Fault(NamedTuple):
    name: str
    owner: type
    method: str
    right: str
    wrong: str


LOOKUP = "self._chains.get((chain, tuple(contents[depth - size : depth])))"
FAULTS = [
    Fault("a reference is not counted", Allocator, "share", "self.references[block] += 1", "pass"),
    Fault("a hit block stays evictable", Allocator, "share", "self.cached.pop(block, None)", "pass"),
    Fault("blocks are freed in forward order", Allocator, "drop", "reversed(blocks)", "blocks"),
    Fault("a shared block is freed", Allocator, "drop", "if self.references[block]:", "if False:"),
    Fault("full blocks are not kept", Allocator, "drop", "len(chain.holders) > 1", "chain.holders"),
    Fault("duplicates are kept", Allocator, "drop", "len(chain.holders) > 1", "len(chain.holders) > 9"),
    Fault("the time of release is not noted", Allocator, "drop", "self._clock += 1", "pass"),
    Fault("an evicted block can be hit", Allocator, "take", "self.unseal(block)", "pass"),
    Fault("an evicted block stays in the LRU", Allocator, "take", "del self.cached[block]", "pass"),
    Fault("another free block leaves the list", Allocator, "take", "self.free.pop()", "self.free.pop(0)"),
    Fault("a taken block has no owner", Allocator, "take", "self.references[block], ", "_, "),
    Fault("an eviction is not counted", Allocator, "take", 'self.counts["evictions"] += 1', "pass"),
    Fault("the newest cached block is evicted", Allocator, "choose", "islice(self.cached,", "islice(reversed(self.cached),"),
    Fault("cached blocks go before free ones", Allocator, "choose", "[*free, *islice(self.cached, count - len(free))]",
          "([*self.cached] + free)[:count]"),
    Fault("a block in use is evicted", Allocator, "choose", "islice(self.cached,",
          "islice((b for b, n in enumerate(self.references) if n),"),
    Fault("allocation begins without enough blocks", Allocator, "choose", "if count > ", "if count - 1 > "),
    Fault("prompts hit the newest block", Allocator, "seal", "(*chain.holders, block)", "(block, *chain.holders)"),
    Fault("a block forgets what it holds", Allocator, "seal", "self.chains[block] = chain", "pass"),
    Fault("the map keeps a stale block", Allocator, "unseal", "if holder != block", ""),
    Fault("all blocks of a content are forgotten", Allocator, "unseal", "if holder != block", "if False"),
    Fault("a block keeps a stale chain", Allocator, "unseal", "self.chains[block] = None", "pass"),
    Fault("undo leaves the holders", Allocator, "snapshot", "chain.holders = held", "pass"),
    Fault("undo leaves the table", Allocator, "snapshot", "vars(table).update(attributes)", "pass"),
    Fault("undo leaves the statistics", Allocator, "snapshot", "self.counts = counts", "pass"),
    Fault("undo loses the order of eviction", Allocator, "snapshot", "resting.sort(key=self._rested.__getitem__)", "pass"),
    Fault("undo leaves the free list", Allocator, "snapshot", "self.free = ", "_ = "),
    Fault("undo leaves the LRU", Allocator, "snapshot", "self.cached = ", "_ = "),
    Fault("an interrupt is not undone", BlockPool, "append_together", "except BaseException:", "except Exception:"),
    Fault("an interrupted release is not undone", BlockPool, "release", "undo()", "pass"),
    Fault("an interrupted fork is not undone", BlockPool, "fork", "undo()", "pass"),
    Fault("the last block is not part of the undo", BlockPool, "append_together", "[*chosen, *writers]", "chosen"),
    Fault("a full hit leaves nothing to compute", BlockPool, "_shareable", "len(prompt.tokens) - 1", "len(prompt.tokens)"),
    Fault("a hit is one block short", BlockPool, "_shareable", "len(prompt.tokens) - 1", "len(prompt.tokens) - 2"),
    Fault("the window is a token short", PrefixIndex, "first_needed", "self._window + 1", "self._window + 2"),
    Fault("a window hits across a hole", PrefixIndex, "match", "self._offloaded else 0", "self._offloaded else held"),
    Fault("media keys are ignored on a hit", PrefixIndex, "match", "media=prompt.media", "media=()"),
    Fault("media spans are misplaced", BlockPool, "commit", "tokens, start, table.media", "tokens, 0, table.media"),
    Fault("a hit begins a chain of its own", BlockPool, "open", "chains[full - 1] if full else", ""),
    Fault("the copy is not reported", BlockPool, "append_together", "copies[place].append(Copy(last, copy))", "pass"),
    Fault("the copy goes the wrong way", BlockPool, "append_together", "Copy(last, copy)", "Copy(copy, last)"),
    Fault("a shared block is written", BlockPool, "append_together", "and references[last] > 1:", "and False:"),
    Fault("the source of a copy is not given up", BlockPool, "append_together", "allocator.drop([last])", "pass"),
    Fault("the shared block stays in the table", BlockPool, "append_together", "blocks[-1] = copy", "pass"),
    Fault("a sealed block is overwritten", BlockPool, "append_together", "or chains[last] is not None", ""),
    Fault("a block is not unsealed", BlockPool, "append_together", "allocator.unseal(last)", "pass"),
    Fault("the shortest of a step writes in place", BlockPool, "append_together",
          "growing.sort()", "growing.sort(reverse=True)"),
    Fault("every table of a step copies", BlockPool, "append_together", "min(many, references[block] - 1)", "many"),
    Fault("a failed step keeps some lengths", BlockPool, "append_together", "table.length = length", "pass"),
    Fault("a failed step keeps its copies", BlockPool, "retract", "[copy.source for copy in copies]", "[]"),
    Fault("a copy taken back is not counted", BlockPool, "retract", "self._allocator.share(sources)", "pass"),
    Fault("a block too few is taken", BlockPool, "append_together",
          "-(-(table.length + count)", "-(-(table.length + count - 1)"),
    Fault("the parent is left out of the chain", BlockPool, "commit", "child(chains[-1],", "child(chains[0],"),
    Fault("committed tokens are forgotten", BlockPool, "commit", "contents[filled:], end", "(), end"),
    Fault("blocks are sealed one place off", BlockPool, "commit", "chains[1:], strict=True", "chains, strict=False"),
    Fault("uncommitted tokens are sealed", BlockPool, "commit", "table.committed + len(tokens)", "table.length"),
    Fault("slots run past a block", BlockPool, "slot_mapping", "max(start, number * size)", "start"),
    Fault("a fork is not counted", BlockPool, "fork", "self._allocator.share(shared)", "pass"),
    Fault("rollback keeps a block", BlockPool, "retract", "self._blocks(length) -", "self._blocks(length + 1) -"),
    Fault("rollback drops the partial block", BlockPool, "retract", "self._blocks(length) -", "length // size -"),
    Fault("rollback does not free", BlockPool, "retract", "self._allocator.drop(surplus)", "pass"),
    Fault("rollback keeps the tail", BlockPool, "retract", "tail = tail[: length % size]", "pass"),
    Fault("rollback keeps the chain", BlockPool, "retract", "chain, tail = chain.parent,", "_, tail = chain.parent,"),
    Fault("rollback keeps what is committed", BlockPool, "retract", "min(length, table.committed)", "table.committed"),
    Fault("the window lets go of a block too many", BlockPool, "slide", "slid = first_needed // self.block_size",
          "slid = self._blocks(first_needed)"),
    Fault("the window lets go of a block too few", BlockPool, "slide", "first_needed // self.block_size",
          "max(first_needed - 1, 0) // self.block_size"),
    Fault("the window lets go of a sink", BlockPool, "slide", "self._blocks(sinks)", "sinks // self.block_size"),
    Fault("the window does not free", BlockPool, "slide", "self._allocator.drop(given_up)", "pass"),
    Fault("a window that slid is rolled back", BlockPool, "slide", "table.slid = slid", "pass"),
    Fault("release does not free", BlockPool, "release", "self._allocator.drop(blocks)", "pass"),
    Fault("a released table stays open", BlockPool, "release", "BlockTable(0, ", "BlockTable(table.generation, "),
    Fault("a released table keeps its blocks", BlockPool, "release", "(), [], 0, 0", "(), table.blocks, 0, 0"),
    Fault("the salt is ignored", PrefixIndex, "root", "(prompt.salt, prompt.extra)", "(None, prompt.extra)"),
    Fault("the adapter is ignored", PrefixIndex, "root", "(prompt.salt, prompt.extra)", "(prompt.salt, None)"),
    Fault("tokens are not compared", PrefixIndex, "match", LOOKUP,
          "next((c for (parent, _), c in self._chains.items() if parent is chain), None)"),
    Fault("parents are not compared", PrefixIndex, "match", LOOKUP,
          "next((c for (_, t), c in self._chains.items() if t == (*contents[depth - size : depth],)), None)"),
    Fault("equal chains are made twice", PrefixIndex, "child", "if chain is None:", "if True:"),
    Fault("what the host has is not hit", PrefixIndex, "match", "or chain in self._offloaded", ""),
    Fault("a prompt is promised more than there is room for", BlockPool, "_match", "<= room", "<= room + 1"),
    Fault("hits that are idle are not counted", BlockPool, "_match", "or chain.holders[0] in cached", ""),
    Fault("a step does not offload", BlockPool, "append_together", "allocator.offload(chosen)", "pass"),
    Fault("a hit does not offload", Allocator, "make_free", "self.offload(victims)", "pass"),
    Fault("a hit evicts what it hits", Allocator, "make_free", "if block not in keep", ""),
    Fault("what a hit evicts stays in the map", Allocator, "make_free", "self.unseal(block)", "pass"),
    Fault("what a hit evicts is lost", Allocator, "make_free", "self.free.append(block)", "pass"),
    Fault("what a hit evicts is not counted", Allocator, "make_free", '["evictions"] += missing', '["evictions"] += 0'),
    Fault("an interrupted eviction is not undone", Allocator, "make_free", "undo()", "pass"),
    Fault("what comes back is not sealed", Allocator, "fill", "self.seal(block, chain)", "pass"),
    Fault("what comes back is not written", Allocator, "fill", "write(blocks)", "pass"),
    Fault("an interrupted hit keeps its blocks", BlockPool, "open", "[*hits, *new]", "hits"),
    Fault("an interrupted hit stays sealed", BlockPool, "open", ", chains=away", ""),
    Fault("an interrupted resume is not undone", BlockPool, "reopen", "undo()", "pass"),
    Fault("a resumed table has no holes", BlockPool, "reopen", "None if block is None else next(taken)", "next(taken, None)"),
    Fault("a block is offloaded under its neighbour's name", GroupHost, "save", "dict(zip(new,", "dict(zip(reversed(new),"),
    Fault("blocks come back in another order", GroupHost, "load", "blocks, contents)", "blocks, contents[::-1])"),
    Fault("the host forgets what is used", HostTier, "get", "self._held[key] = self._held.pop(key)", "self._held[key]"),
    Fault("the newest of the host goes first", HostTier, "_trim", "iter(self._held)", "reversed(self._held)"),
    Fault("the host holds more than its budget", HostTier, "_trim", "> self.budget", "> self.budget + 16"),
    Fault("the host miscounts its bytes", HostTier, "discard", "self.nbytes -= copy.nbytes", "pass"),
]  # fmt: skip
QUICK = {
    "blocks are freed in forward order",
    "an evicted block can be hit",
    "the copy is not reported",
    "a sealed block is overwritten",
    "the salt is ignored",
    "tokens are not compared",
    "what comes back is not written",
}


@seed(0)
class Soon(PoolMachine):
    """With any seed the machine finds a fault sooner or later; with this one those of the quick run within a few lives."""


def mutant(fault: Fault) -> Mutant:
    target = f"{fault.owner.__module__}:{fault.owner.__qualname__}.{fault.method}"
    return Mutant(fault.name, target, fault.right, fault.wrong)


def test_every_fault_has_its_line():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        with planted(mutant(fault)):
            pass


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else pytest.mark.slow) for f in FAULTS]
)
def test_fault_is_found(fault):
    machine = Soon if fault.name in QUICK else PoolMachine
    with planted(mutant(fault)), pytest.raises((Exception, Interrupted, pytest.fail.Exception)) as found:
        run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=1000, phases=[Phase.generate]))
    assert not isinstance(found.value, HypothesisException), "the machine is not deterministic"
