-- Plain requests: a check of one token bucket, or of several, of which no tokens were drawn ahead or are held, at a tick of a
-- microsecond. Nearly all requests are plain. This is the work of bucket.lua without its tables and functions; all other
-- requests are left to bucket.lua.

local WIDTH = 41 -- of a bucket in a spec

-- The level of a bucket right now; nil if it isn't plain.
local function level_of(key, gain, tick, full)
  if tick ~= 1 then
    return nil
  end
  local stored = pcall('GET', key)
  if not stored then
    return full
  elseif type(stored) ~= 'string' or #stored ~= 16 then
    return nil
  end
  local level, stamp = unpacked('<dd', stored)
  local gained = (now - stamp) * gain
  if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST then
    return nil
  end
  return min(level + gained, full)
end

local function plain(text, numbers, key)
  local _, unit, gain, tick, full = unpacked('<ddddd', text, 3)
  local level = level_of(key, gain, tick, full)
  if not level then
    return nil
  end
  local cost = tonumber(numbers)
  local passes = cost * unit <= level
  if passes then
    level = level - cost * unit
    call('SET', key, packed('<dd', level, now), 'PX', milliseconds((full - level) / gain))
  end
  answer[length + 1], answer[length + 2], answer[length + 3] = passes and 1 or 0, level, now
  length = length + 3
  return 1
end

-- The same of several buckets: all pass, or none is charged. The levels are in the answer from the start.
local function plain_all(text, numbers, next_key)
  local count, passes = (#text - 1) / WIDTH, true
  for i = 1, count do
    local at = 2 + WIDTH * (i - 1)
    if string.sub(text, at, at) ~= 'b' then
      return nil
    end
    local _, unit, gain, tick, full = unpacked('<ddddd', text, at + 1)
    local level = level_of(KEYS[next_key + i - 1], gain, tick, full)
    if not level then
      return nil
    end
    answer[length + 2 * i], answer[length + 2 * i + 1] = level, now
    passes = passes and unpacked('<d', numbers, 8 * i - 7) * unit <= level
  end
  answer[length + 1] = passes and 1 or 0
  if passes then
    for i = 1, count do
      local _, unit, gain, _, full = unpacked('<ddddd', text, 3 + WIDTH * (i - 1))
      local level = answer[length + 2 * i] - unpacked('<d', numbers, 8 * i - 7) * unit
      answer[length + 2 * i] = level
      call('SET', KEYS[next_key + i - 1], packed('<dd', level, now), 'PX', milliseconds((full - level) / gain))
    end
  end
  length = length + 1 + 2 * count
  return count
end

local next_key, simple, other = 1, nil, nil
for position = 3, #ARGV, 2 do
  local text, numbers, width = ARGV[position], ARGV[position + 1], nil
  local verb = string.sub(text, 1, 1)
  if verb == 'c' then
    if #text == 1 + WIDTH then
      width = string.sub(text, 2, 2) == 'b' and plain(text, numbers, KEYS[next_key]) or nil
    elseif #text % WIDTH == 1 then
      width = plain_all(text, numbers, next_key)
    end
  elseif verb == 'h' or verb == 't' then
    simple = simple or lean()
    width = simple[verb](text, numbers, next_key)
  end
  if not width then
    other = other or decide()
    width = other(text, numbers, next_key)
  end
  next_key = next_key + width
end
answer[2] = stepped
return answer
