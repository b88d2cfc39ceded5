-- What the other parts share. Together they are one script: this file first, decide.lua last, and each of the others as
-- a function between them, which is called when the first request needs it. (Every function that the script makes costs
-- time in every call.)

local floor, fmod, min, max = math.floor, math.fmod, math.min, math.max
local packed, unpacked = struct.pack, struct.unpack
local call, try, pcall = redis.call, pcall, redis.pcall

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

-- The answer grows at its end.
local answer, length = { now, 0 }, 2

local function say(number)
  length = length + 1
  answer[length] = number
end

-- Whether two numbers can be what we have written.
local function are_whole(one, other)
  return one == floor(one) and other == floor(other) and one <= LARGEST and one >= -LARGEST and other <= LARGEST
    and other >= 0
end

local function digits(number)
  return string.format('%.0f', number)
end

-- The expiry after so many microseconds: never early, and never 0, which would delete.
local function milliseconds(microseconds)
  return max(floor(min(microseconds, LARGEST) / 1000), 0) + 2 + ARGV[2]
end
