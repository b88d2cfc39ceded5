-- The least headroom of a bucket since each of its holds. headroom.py has the same, and says why.
--
-- Stored with the bucket, each as three doubles: the negative serial number of its last hold, 0, and the number before
-- that of its first, which is random: so that a bucket that was dropped and begun anew gives nothing back to the holds of
-- the one before. Then for each entry its negative serial number, its headroom in units, and how many open holds belong
-- to it. Without any entry, nothing is stored.

local MOST, GROWN = 16, 24 -- entries: beyond the latter, they are joined until there are no more than the former
local CLOSE = 1 + 1e-14 -- quotients that differ by less may be rounded to the wrong order

-- One that is too large to be exact counts as less.
local function room_of(bucket)
  return min(bucket.cap - bucket.level, LARGEST)
end

-- The same at a moment that the bucket is up to, without what the tick that has begun will give.
local function room_at(bucket, limit, moment)
  local room, elapsed = room_of(bucket), moment - bucket.stamp
  if limit.tick > 1 and elapsed > 0 then
    local gained = elapsed * limit.gain
    local rest = fmod(gained, limit.tick)
    room = room - (gained - rest) / limit.tick - (rest > 0 and 1 or 0)
  end
  return max(room, 0)
end

-- Read the rows that begin at an index, and return the one after them.
local function read_rows(bucket, numbers, i)
  local serials, rooms, holds, count = {}, {}, {}, 0
  bucket.stack = { last = -numbers[i], base = numbers[i + 2], serials = serials, rooms = rooms, holds = holds }
  i = i + 3
  while i < #numbers and numbers[i] < 0 do
    count = count + 1
    serials[count], rooms[count], holds[count] = -numbers[i], numbers[i + 1], numbers[i + 2]
    i = i + 3
  end
  return i
end

local function rows(bucket)
  local stack = bucket.stack
  if #stack.rooms == 0 or bucket.level >= bucket.cap then
    return ''
  end
  local serials, holds, numbers = stack.serials, stack.holds, { -stack.last, 0, stack.base }
  for i, room in ipairs(stack.rooms) do
    numbers[3 * i + 1], numbers[3 * i + 2], numbers[3 * i + 3] = -serials[i], room, holds[i]
  end
  return packed('<' .. string.rep('d', #numbers), unpack(numbers))
end

-- Remove an entry: its holds belong to the one before it, if there is any.
local function remove(stack, i)
  local holds = table.remove(stack.holds, i)
  if i > 1 then
    stack.holds[i - 1] = stack.holds[i - 1] + holds
  end
  table.remove(stack.rooms, i)
  return table.remove(stack.serials, i), holds
end

local function see(bucket, limit, moment)
  local stack, room = bucket.stack, room_at(bucket, limit, moment)
  local rooms = stack.rooms
  if #rooms == 0 or rooms[#rooms] <= room then
    return
  end
  while #rooms > 1 and rooms[#rooms - 1] > room do
    remove(stack, #rooms)
  end
  if room == 0 or rooms[#rooms - 1] == room then
    remove(stack, #rooms)
  else
    rooms[#rooms] = room
  end
end

-- Whether one / two < three / four, exactly: their products may pass 2^53.
local function is_less(one, two, three, four)
  while true do
    local rest, other = fmod(one, two), fmod(three, four)
    local whole, others = (one - rest) / two, (three - other) / four
    if whole ~= others or rest == 0 or other == 0 then
      return whole < others or whole == others and rest == 0 and other > 0
    end
    one, two, three, four = four, other, two, rest
  end
end

-- Join the two neighbours whose ratio is closest to 1.
local function merge(stack)
  local rooms, best = stack.rooms, 2
  local least = rooms[2] / rooms[1]
  for i = 3, #rooms do
    local ratio = rooms[i] / rooms[i - 1]
    if ratio < least * CLOSE and (ratio * CLOSE < least or is_less(rooms[i], rooms[i - 1], rooms[best], rooms[best - 1]))
    then
      best, least = i, ratio
    end
  end
  remove(stack, best)
end

-- Add a hold, and return its serial number.
local function add(bucket, base)
  local stack, room = bucket.stack, room_of(bucket)
  if not stack or #stack.rooms == 0 then
    stack = { last = base, base = base, serials = {}, rooms = {}, holds = {} }
    bucket.stack = stack
  end
  stack.last = stack.last + 1
  local count = #stack.rooms
  if room > 0 then
    stack.serials[count + 1], stack.rooms[count + 1], stack.holds[count + 1] = stack.last, room, 1
    if count + 1 > GROWN then
      while #stack.rooms > MOST do
        merge(stack)
      end
    end
  elseif count > 0 then
    stack.holds[count] = stack.holds[count] + 1
  end
  return stack.last
end

-- The entry that a hold belongs to; 0 if it has none any more.
local function place_of(stack, serial)
  if serial <= stack.base or serial > stack.last then
    return 0
  end
  local place = #stack.serials
  while place > 0 and stack.serials[place] > serial do
    place = place - 1
  end
  return place
end

-- Give a cost back to a hold, or less.
local function give_back(bucket, limit, cost, serial)
  local stack = bucket.stack
  if not stack then
    return
  end
  see(bucket, limit, now)
  local unit, rooms, place = limit.unit, stack.rooms, place_of(stack, serial)
  local least = rooms[place] or 0
  local given = cost > (least - fmod(least, unit)) / unit and least or cost * unit
  if given <= 0 then
    return
  end
  bucket.level = bucket.level + given
  local left = least - given
  for i = 1, #rooms do
    rooms[i] = i > place and rooms[i] - given or min(rooms[i], left)
  end
  for i = #rooms, 1, -1 do
    if rooms[i] == 0 or rooms[i] == rooms[i - 1] then
      remove(stack, i)
    end
  end
end

-- A hold has ended: an entry without any is dropped. Return whether anything has changed.
local function leave(bucket, serial)
  local stack = bucket.stack
  local place = stack and place_of(stack, serial) or 0
  if place == 0 then
    return false
  end
  stack.holds[place] = stack.holds[place] - 1
  if stack.holds[place] <= 0 then
    remove(stack, place)
  end
  return true
end

return { read_rows = read_rows, rows = rows, see = see, add = add, give_back = give_back, leave = leave }
