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


@mypyc_attr(acyclic=True)
class LeastHeadroom:
    """The least headroom of a bucket since each of its holds.

    A hold is known by its serial number, and by the `epoch` of the stack that gave it: a number that no other stack
    has, so that a bucket that was dropped and begun anew gives nothing back to the holds of the one before.
    """

    __slots__ = ("epoch", "holds", "open", "rooms", "serials")

    def __init__(self) -> None:
        self.epoch: Final[i64] = next(_epochs)
        self.holds: i64 = 0  # how many were added
        self.serials: Final[list[int]] = []
        self.open: Final[list[int]] = []  # how many holds belong to each entry: those up to the next serial number
        self.rooms: Final[list[int]] = []  # in units, growing from the oldest hold to the newest

    # Nothing that the garbage collector tracks is made here: a finalizer could spend in the middle of a step.

    def see(self, room: i64) -> None:
        """Take note of a headroom. None at all means that nothing can be given back to any hold up to now."""
        serial: i64 = 0
        count: i64 = 0
        while self.rooms and self.rooms[-1] > room:
            serial = self.serials.pop()
            self.rooms.pop()
            count += self.open.pop()
        if serial != 0 and room > 0:
            if self.rooms and self.rooms[-1] == room:
                self.open[-1] += count
            else:
                self.serials.append(serial)
                self.rooms.append(room)
                self.open.append(count)

    def add(self, room: i64) -> i64:
        """Add a hold that has left this headroom, and return its serial number."""
        self.holds += 1
        self.serials.append(self.holds)
        self.rooms.append(room)
        self.open.append(1)
        if len(self.rooms) > MOST:
            self._merge()
        return self.holds

    def _merge(self) -> None:
        """Join the two neighbours whose ratio is closest to 1."""
        best = 1
        for i in range(2, len(self.rooms)):
            if self.rooms[i] * self.rooms[best - 1] < self.rooms[best] * self.rooms[i - 1]:
                best = i
        self._join(best)

    def _join(self, place: i64) -> None:
        """Let the holds of an entry belong to the one below."""
        self.serials.pop(place)
        self.rooms.pop(place)
        count = self.open.pop(place)
        if place > 0:
            self.open[place - 1] += count

    def close(self, serial: i64) -> None:
        """Forget a hold to which nothing will be given back any more. Each is closed once."""
        place = self._place(serial)
        if place >= 0:
            self.open[place] -= 1
            if self.open[place] == 0:
                self.serials.pop(place)
                self.rooms.pop(place)
                self.open.pop(place)

    def least(self, serial: i64) -> i64:
        """The least headroom since a hold."""
        place = self._place(serial)
        return 0 if place < 0 else self.rooms[place]

    def _place(self, serial: i64) -> i64:
        """The index of the entry that a hold belongs to; -1 if it has none any more."""
        place: i64 = len(self.serials) - 1
        while place >= 0 and self.serials[place] > serial:
            place -= 1
        return place

    def give_back(self, serial: i64, given: i64) -> None:
        """Take note that a hold has given back so many units: more than none, and at most its least headroom."""
        place = self._place(serial)
        left = self.rooms[place] - given
        for i in range(len(self.rooms)):
            if i > place:
                self.rooms[i] -= given
            elif self.rooms[i] > left:
                self.rooms[i] = left
        # Of equal neighbours the oldest is enough, and one without headroom is none.
        for i in range(len(self.rooms) - 1, -1, -1):
            if self.rooms[i] == 0 or (i > 0 and self.rooms[i] == self.rooms[i - 1]):
                self._join(i)
