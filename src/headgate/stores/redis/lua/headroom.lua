-- The least headroom of a bucket since each of its holds. headroom.py has the same, and says why.
--
-- A list of numbers, which are stored with the bucket. The first three: the negative serial number of the last hold, 0, and
-- the number before that of the first, which is random: so that a bucket that was dropped and begun anew gives nothing
-- back to the holds of the one before. Then three for each entry: its negative serial number, its headroom in units, and
-- how many open holds belong to it. Without any entry, nothing is stored.

local fmod = math.fmod
local MOST, GROWN = 51, 75 -- numbers of 16 and of 24 entries: beyond the latter, they are joined until the former is left
local CLOSE = 1 + 1e-14 -- quotients that differ by less may be rounded to the wrong order

-- Remove an entry: its holds belong to the one before it, if there is any.
local function remove(rooms, at)
  local count = #rooms
  if at > 4 then
    rooms[at - 1] = rooms[at - 1] + rooms[at + 2]
  end
  for i = at, count - 3 do
    rooms[i] = rooms[i + 3]
  end
  rooms[count], rooms[count - 1], rooms[count - 2] = nil, nil, nil
end

-- Take note of a headroom.
local function see(rooms, room)
  local last = #rooms - 2
  if last < 4 or rooms[last + 1] <= room then
    return
  end
  while last > 4 and rooms[last - 2] > room do
    remove(rooms, last)
    last = last - 3
  end
  if room == 0 or last > 4 and rooms[last - 2] == room then
    remove(rooms, last)
  else
    rooms[last + 1] = room
  end
end

-- Take note of what a bucket lacks until it is full, at a moment that it is up to.
local function see_bucket(bucket, limit, moment)
  local room, elapsed = min(bucket.cap - bucket.level, LARGEST), moment - bucket.stamp
  if limit.tick > 1 and elapsed > 0 then -- without what the tick that has begun will give
    local gained = elapsed * limit.gain
    local rest = fmod(gained, limit.tick)
    room = room - (gained - rest) / limit.tick - (rest > 0 and 1 or 0)
  end
  see(bucket.rooms, max(room, 0))
end

-- Add a hold that has left a headroom. Return the list, which is a new one if there was none, and the serial number.
local function add(rooms, room, base)
  if not rooms or #rooms == 3 then
    rooms = { -base, 0, base }
  end
  local last, count = -rooms[1] + 1, #rooms
  rooms[1] = -last
  if room > 0 then
    rooms[count + 1], rooms[count + 2], rooms[count + 3] = -last, room, 1
    if count + 3 > GROWN then -- it is rare: only now the functions for it are made

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

      while #rooms > MOST do -- join the two neighbours whose ratio is closest to 1
        local best, least = 7, rooms[8] / rooms[5]
        for i = 10, #rooms, 3 do
          local ratio = rooms[i + 1] / rooms[i - 2]
          if ratio < least * CLOSE
            and (ratio * CLOSE < least or is_less(rooms[i + 1], rooms[i - 2], rooms[best + 1], rooms[best - 2])) then
            best, least = i, ratio
          end
        end
        remove(rooms, best)
      end
    end
  elseif count > 3 then
    rooms[count] = rooms[count] + 1
  end
  return rooms, last
end

-- The place of the entry that a hold belongs to; 1 if it has none any more.
local function place_of(rooms, serial)
  if serial <= rooms[3] or serial > -rooms[1] then
    return 1
  end
  local at = #rooms - 2
  while at > 1 and -rooms[at] > serial do
    at = at - 3
  end
  return at
end

-- Give a cost back to a hold, or less, after the headroom of this moment was seen. Return how many units.
local function give_back(rooms, cost, unit, serial)
  local place = place_of(rooms, serial)
  local least = place > 1 and rooms[place + 1] or 0
  local given = cost > (least - fmod(least, unit)) / unit and least or cost * unit
  if given <= 0 then
    return 0
  end
  for i = 4, #rooms, 3 do
    rooms[i + 1] = i > place and rooms[i + 1] - given or min(rooms[i + 1], least - given)
  end
  for i = #rooms - 2, 4, -3 do
    if rooms[i + 1] == 0 or i > 4 and rooms[i + 1] == rooms[i - 2] then
      remove(rooms, i)
    end
  end
  return given
end

-- A hold has ended: an entry without any is dropped. Return whether anything has changed.
local function leave(rooms, serial)
  local place = place_of(rooms, serial)
  if place == 1 then
    return false
  end
  rooms[place + 2] = rooms[place + 2] - 1
  if rooms[place + 2] <= 0 then
    remove(rooms, place)
  end
  return true
end

-- What is stored of it.
local function text(rooms)
  return #rooms > 3 and packed('<' .. string.rep('d', #rooms), unpack(rooms)) or ''
end

return { see = see, see_bucket = see_bucket, add = add, give_back = give_back, leave = leave, text = text }
