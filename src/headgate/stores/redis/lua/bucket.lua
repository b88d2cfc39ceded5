-- Token buckets. The arithmetic is that of `TokenBucket` in token_bucket.py, in whole numbers that doubles hold exactly.
--
-- Stored: a string of little-endian doubles, the level in units and its stamp in microseconds; then rows of three more:
-- for each slice of tokens drawn ahead its number, its tokens, and when it expires; those of headroom.lua; and 0, when the
-- first of its holds gives back what it has taken, and 0. A full bucket is not stored.

-- level + count * size, without a product beyond 2^53 where the result isn't.
local function added(level, count, size)
  local half = floor(count / 2)
  return level + half * size + (count - half) * size
end

-- Microseconds from a level until the bucket is at its cap.
local function to_cap(limit, level, cap)
  local gain = limit.gain
  local below, above = 0, level
  if level < 0 then
    below, above = -level, 0 -- apart, since the difference to the cap may pass 2^53
  end
  local rest_above, rest_below = fmod(cap - above, gain), fmod(below, gain)
  local ticks, rest = (cap - above - rest_above) / gain + (below - rest_below) / gain, rest_above + rest_below
  if rest >= gain then
    rest, ticks = rest - gain, ticks + 1
  end
  if ticks >= floor(LARGEST / limit.tick) then
    return LARGEST
  end
  return ticks * limit.tick + math.ceil(rest * limit.tick / gain)
end

-- Bring a bucket up to a moment.
local function earn(bucket, limit, moment)
  local elapsed, gain = moment - bucket.stamp, limit.gain
  if elapsed > 0 then
    if limit.tick == 1 and elapsed * gain <= LARGEST then
      bucket.level, bucket.stamp = min(bucket.level + elapsed * gain, bucket.cap), moment
    elseif elapsed >= to_cap(limit, bucket.level, bucket.cap) then
      bucket.level, bucket.stamp = bucket.cap, moment
    else
      local ticks = (elapsed - fmod(elapsed, limit.tick)) / limit.tick
      bucket.level, bucket.stamp = added(bucket.level, ticks, gain), bucket.stamp + ticks * limit.tick
    end
  elseif elapsed < 0 then
    if bucket.level == bucket.cap then
      bucket.stamp = moment
    elseif -elapsed >= patience then
      bucket.stamp, bucket.changed, stepped = moment, true, 1
    end
  end
end

local function passes(bucket, limit, cost)
  return cost * limit.unit <= bucket.level
end

local function spend(bucket, limit, cost)
  if bucket.rooms then
    headroom().see_bucket(bucket, limit, now)
  end
  local level = bucket.level - cost * limit.unit
  if cost > limit.capacity or level < -LARGEST then
    level = max(added(bucket.level, -cost, limit.unit), -LARGEST)
  end
  bucket.level = level
end

local function countable(bucket, limit, cost)
  local room = LARGEST + min(bucket.level, 0)
  return cost <= (room - fmod(room, limit.unit)) / limit.unit
end

local function refund(bucket, limit, cost)
  bucket.level = min(added(bucket.level, cost, limit.unit), bucket.cap)
end

local MOST_NUMBERS = 180 -- that are unpacked together

local function read_rows(bucket, limit, stored)
  local slices, numbers, i = {}, {}, 1
  for at = 17, #stored, 8 * MOST_NUMBERS do
    local some = { unpacked('<' .. string.rep('d', min((#stored - at + 1) / 8, MOST_NUMBERS)), stored, at) }
    some[#some] = nil -- where it has ended
    if #numbers == 0 then
      numbers = some
    else
      for _, number in ipairs(some) do
        numbers[#numbers + 1] = number
      end
    end
  end
  while i < #numbers do
    local number, one, other = numbers[i], numbers[i + 1], numbers[i + 2]
    if not (are_whole(number, one) and are_whole(one, other)) then
      return false
    elseif number < 0 then
      local rooms = bucket.rooms or {}
      local count = #rooms
      rooms[count + 1], rooms[count + 2], rooms[count + 3] = number, one, other
      bucket.rooms, i = rooms, i + 3
    else
      if number > 0 then
        slices[#slices + 1] = { number = number, tokens = one, expires = other }
      else
        bucket.due = one
      end
      i = i + 3
    end
  end
  return #slices == 0 or draw_ahead().load(bucket, limit, slices, earn)
end

local function load(limit, key)
  local stored = pcall('GET', key)
  if not stored then
    return { key = key, level = limit.full, stamp = now, cap = limit.full, drawn = false, known = false }
  end
  local size = type(stored) == 'string' and #stored or 0
  if size % 24 ~= 16 then
    return nil
  end
  local level, stamp = unpacked('<dd', stored)
  if not are_whole(level, stamp) or level > limit.full then
    return nil
  end
  local bucket = { key = key, level = level, stamp = stamp, cap = limit.full, drawn = false, known = true }
  if size > 16 and not read_rows(bucket, limit, stored) then
    return nil
  end
  earn(bucket, limit, now)
  return bucket
end

local function save(bucket, limit)
  local level, stamp = bucket.level, bucket.stamp
  if level < limit.full then
    local stored, refill = packed('<dd', level, stamp), (limit.full - level) / limit.gain * limit.tick
    local expiry = stamp - now + refill -- to a microsecond or so, which `milliseconds` makes up for
    if bucket.drawn then
      for _, slice in ipairs(bucket.drawn) do
        stored = stored .. packed('<ddd', slice.number, slice.tokens, slice.expires)
        expiry = max(expiry, slice.expires - now + refill) -- at the worst nothing is refilled before it expires
      end
    end
    if bucket.rooms and level < bucket.cap then
      stored = stored .. headroom().text(bucket.rooms)
    end
    expiry = milliseconds(expiry)
    if bucket.due then
      stored = stored .. packed('<ddd', 0, bucket.due, 0)
      release().keep(bucket, expiry)
    end
    call('SET', bucket.key, stored, 'PX', expiry)
    bucket.known = true
  else
    if bucket.known then
      call('DEL', bucket.key)
    end
    if bucket.due then
      release().drop(bucket)
    end
  end
end

local function report(bucket)
  answer[length + 1], answer[length + 2] = bucket.level, bucket.stamp
  length = length + 2
end

local function counts(bucket)
  return bucket.level < bucket.cap
end

local function correct(bucket, limit, held, actual, serial)
  if actual > held then
    spend(bucket, limit, actual - held)
  elseif actual < held and bucket.rooms then
    local list = headroom()
    list.see_bucket(bucket, limit, now)
    bucket.level = bucket.level + list.give_back(bucket.rooms, held - actual, limit.unit, serial)
  end
end

-- Add a hold, and return its serial number.
local function mark(bucket, base)
  local serial
  bucket.rooms, serial = headroom().add(bucket.rooms, min(bucket.cap - bucket.level, LARGEST), base)
  return serial
end

-- Fill it up: tokens that were drawn ahead stay out.
local function forget(bucket, limit)
  bucket.level, bucket.stamp = bucket.cap, now
  save(bucket, limit)
end

return {
  numbers = '<ddddd',
  read = function(capacity, unit, gain, tick, full)
    return { capacity = capacity, unit = unit, gain = gain, tick = tick, full = full }
  end,
  load = load, passes = passes, countable = countable, spend = spend, refund = refund, save = save, report = report,
  counts = counts,
  forget = forget, correct = correct, counts_costs = true,
  mark = mark,
  leave = function(bucket, serial) return bucket.rooms and headroom().leave(bucket.rooms, serial) end,
}
