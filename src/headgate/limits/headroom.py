"""How much a hold may give back to a token bucket.

The law. Whatever is held, given back and spent, a bucket is as full as one in which each settled hold had spent what it
cost, when it was made. So in any t seconds at most capacity + rate * t passes, counted by these costs and times.

Why giving back takes care. A bucket refills while something is held. Hold 5 of 10, wait until the bucket is full again,
and spend 3: if cancelling gave 5 back, 10 more would pass, 13 at once. Had nothing been held, the bucket would have
been full, too, so nothing is missing that could be given back.

What is exact. Let the headroom of a bucket be what it lacks until it is full. A bucket without a hold of d would have
had d units more since then, until it was full: from then on it has only as many more as it lacked at that moment. So it
has min(d, least headroom since the hold) units more now, and these are given back.

What has to be known. The least headroom since each hold, at any time. Spending makes the headroom larger, and time
makes it smaller, so it is least right before something is spent. Since the older of two holds has seen all that the
newer one has, its least headroom is never larger. So a stack is enough, with the oldest hold at the bottom and numbers
that grow upwards: a headroom that is seen replaces all larger ones at the top, and each hold is pushed once and popped
once. An entry whose holds have all been settled is dropped, so that the stack of a bucket with few open holds is short.

    event                    bucket of 10   stack: hold, least headroom since it
    hold A of 2               8             A 2
    hold B of 3               5             A 2, B 5
    1 s later, at 1/s: +1     6             (seen at the next step)
    spend 4                   2             A 2, B 4
    cancel B: gives 3         5             A 1 (what was left for B; B has as much, and is dropped)
    cancel A: gives 1         6             (nothing is left for either)

Without A and B the bucket would have been full when 4 were spent, and 6 are left. Giving back g to one hold changes
what the others would have seen: all headrooms since then are g smaller. So the number of each newer hold shrinks by g,
and that of an older one to what is left for the hold itself, if that is less.

The bound. A stack has at most `MOST` entries. Beyond that, the two whose ratio is closest to 1 become one, with the
smaller number: a hold may then get back less than is due, by that ratio, and never more.
"""

from itertools import count
from time import time_ns
from typing import Final

from headgate._native import i64, mypyc_attr

MOST: Final = 16
"""The entries of a stack, for each bucket."""

_epochs: Final = count(time_ns() // 1000)


@mypyc_attr(acyclic=True, free_list_len=1)
class Room:
    """An entry of a stack: the least headroom since some holds."""

    __slots__ = ("below", "open", "room", "serial")

    def __init__(self, serial: i64, room: i64, below: "Room | None") -> None:
        self.serial: i64 = serial  # of the first hold that belongs to it; the last is the one before the entry above
        self.room: i64 = room  # in units, growing upwards
        self.open: i64 = 1  # how many of its holds are yet to be closed
        self.below: Room | None = below


@mypyc_attr(acyclic=True)
class LeastHeadroom:
    """The least headroom of a bucket since each of its holds.

    A hold is known by its serial number, and by the `epoch` of the stack that gave it: a number that no other stack
    has, so that a bucket that was dropped and begun anew gives nothing back to the holds of the one before.
    """

    __slots__ = ("epoch", "holds", "size", "top")

    def __init__(self) -> None:
        self.epoch: Final[i64] = next(_epochs)
        self.holds: i64 = 0  # how many were added
        self.top: Room | None = None  # the newest entry
        self.size: i64 = 0

    # Nothing that the garbage collector tracks is made here: a finalizer could spend in the middle of a step.

    def see(self, room: i64) -> None:
        """Take note of a headroom. None at all means that nothing can be given back to any hold up to now."""
        top = self.top
        if top is None or top.room <= room:
            return
        joined = top  # all larger ones become one
        below = top.below
        self.size -= 1
        while below is not None and below.room > room:
            below.open += joined.open
            joined = below
            below = below.below
            self.size -= 1
        if below is not None and below.room == room:
            below.open += joined.open
            self.top = below
        elif room > 0:
            joined.room = room
            self.top = joined
            self.size += 1
        else:
            self.top = None

    def add(self, room: i64) -> i64:
        """Add a hold that has left this headroom, and return its serial number."""
        self.holds += 1
        self.top = Room(self.holds, room, self.top)
        self.size += 1
        if self.size > MOST:
            self._merge()
        return self.holds

    def _merge(self) -> None:
        """Join the two neighbours whose ratio is closest to 1."""
        above: Room | None = None
        best: Room | None = None  # above the upper one of the two
        smallest = 0.0
        one = self.top
        while one is not None and one.below is not None:
            ratio = float(one.room) / float(one.below.room)
            if smallest == 0.0 or ratio <= smallest:
                best = above
                smallest = ratio
            above = one
            one = one.below
        self._join(best)

    def _join(self, above: Room | None) -> None:
        """Let the holds of the entry under this one (None: of the top) belong to the one below that."""
        one = self.top if above is None else above.below
        assert one is not None
        if one.below is not None:
            one.below.open += one.open
        self._unlink(above, one)

    def _unlink(self, above: Room | None, one: Room) -> None:
        if above is None:
            self.top = one.below
        else:
            above.below = one.below
        self.size -= 1

    def close(self, serial: i64) -> None:
        """Forget a hold to which nothing will be given back any more. Each is closed once."""
        above: Room | None = None
        one = self.top
        while one is not None and one.serial > serial:
            above = one
            one = one.below
        if one is not None:
            one.open -= 1
            if one.open == 0:
                self._unlink(above, one)

    def close_lone(self, serial: i64, room: i64) -> i64:
        """Forget a hold, if no other is open, and return the least headroom since it, `room` included; otherwise -1.

        As nothing is left that could learn of what it gives back, this does what `see`, `least`, `give_back` and
        `close` would.
        """
        one = self.top
        if one is None or one.below is not None or one.open != 1 or one.serial > serial:
            return -1
        least = one.room
        self.top = None
        self.size = 0
        if room < least:
            return room
        return least

    def least(self, serial: i64) -> i64:
        """The least headroom since a hold."""
        one = self.top
        while one is not None and one.serial > serial:
            one = one.below
        if one is None:  # not in one expression, which would make an object
            return 0
        return one.room

    def give_back(self, serial: i64, given: i64) -> None:
        """Take note that a hold has given back so many units: more than none, and at most its least headroom."""
        one = self.top
        if one is not None and one.below is None and one.room > given:  # as most are
            one.room -= given
            return
        while one is not None and one.serial > serial:
            one.room -= given
            one = one.below
        assert one is not None
        left = one.room - given
        while one is not None:
            if one.room > left:
                one.room = left
            one = one.below
        # Of equal neighbours the oldest is enough, and one without headroom is none.
        above: Room | None = None
        one = self.top
        while one is not None:
            below = one.below
            if one.room == 0 or (below is not None and below.room == one.room):
                self._join(above)
            else:
                above = one
            one = below
