-- Shared by the other parts. Together they are one script: this file, then plain.lua, in which `x_lua` stands for a function
-- with the contents of x.lua: check_all.lua, headroom.lua, lean.lua for holds that are simple, and decide.lua for all that
-- is neither plain nor simple, in which the others are functions. Every function and table that the script makes costs
-- time, the more the more locals it uses, and nearly all calls are plain. So each is made where it is first needed.
--
-- KEYS: the keys of every request, in their order.
-- ARGV: the time in microseconds, or "" for the server's; milliseconds that are added to every expiry; then for each
-- request its spec (the same bytes for many requests), and its numbers.
-- The answer is a list of whole numbers: the time; whether the clock was seen to have stepped back; and for each
-- request a status followed by the numbers of the verb. The status is 1 (done, or passed), 0 (denied), or another of
-- the verb. Below 0 nothing was done, and nothing follows: -1 the value of a key isn't ours; ask again, -2 with other
-- periods of the calendar, -3 since a call gives back only so much of what holds have taken, or -4 in the form for holds
-- that aren't simple, with the shape.
--
-- A spec: a letter for the verb; for each limit a letter for its kind, followed by its numbers as little-endian doubles
-- (after an 'a' if it is the first of an ask, where this matters); 'o' and the numbers of a backoff, if violations are
-- recorded; 'i' and the microseconds for which the request's id is remembered, if it has one.

local floor, min, max = math.floor, math.min, math.max
local packed, unpacked = struct.pack, struct.unpack
local call, try, pcall, KEYS, ARGV = redis.call, pcall, redis.pcall, KEYS, ARGV

local LARGEST = 9007199254740991 -- 2^53 - 1

-- A clock that stepped back by this much starts again from the new time; by less, it stands still.
local patience, stepped = 1000000, 0

local now
if ARGV[1] == '' then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now, patience = tonumber(ARGV[1]), math.huge
end

-- The answer grows at its end. A table that is made with room for a check's takes less time than one that grows; what is
-- left of that is sent, too, and nobody reads it.
local answer, length = { now, 0, 0, 0, 0 }, 2

-- Whether two numbers can be ours.
local function are_whole(one, other)
  return one == floor(one) and other == floor(other) and one <= LARGEST and one >= -LARGEST and other <= LARGEST
    and other >= 0
end

local margin = 2 + ARGV[2]

-- The expiry after so many microseconds: never early, and never 0, which would delete.
local function milliseconds(microseconds)
  local exact = (microseconds < LARGEST and microseconds or LARGEST) / 1000
  return exact >= 1 and exact - exact % 1 + margin or margin
end
