-- Plain requests: a check of one token bucket, of which no tokens were drawn ahead, at a tick of a microsecond. Nearly all
-- requests are plain. This is the work of bucket.lua without its tables and functions; all other requests are left to
-- bucket.lua.

local function plain(text, numbers, key)
  local _, unit, gain, tick, full = unpacked('<ddddd', text, 3)
  local level, stored = full, pcall('GET', key)
  if tick ~= 1 then
    return false
  elseif stored then
    if type(stored) ~= 'string' or #stored ~= 16 then
      return false
    end
    local stamp
    level, stamp = unpacked('<dd', stored)
    local gained = (now - stamp) * gain
    if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST then
      return false
    end
    level = min(level + gained, full)
  end
  local cost = tonumber(numbers)
  local passes = cost * unit <= level
  if passes then
    level = level - cost * unit
    call('SET', key, packed('<dd', level, now), 'PX', milliseconds((full - level) / gain))
  end
  answer[length + 1], answer[length + 2], answer[length + 3] = passes and 1 or 0, level, now
  length = length + 3
  return true
end

local next_key, other = 1, nil
for position = 3, #ARGV, 2 do
  local text, numbers = ARGV[position], ARGV[position + 1]
  if #text == 42 and string.sub(text, 1, 2) == 'cb' and plain(text, numbers, KEYS[next_key]) then
    next_key = next_key + 1
  else
    other = other or decide()
    next_key = next_key + other(text, numbers, next_key)
  end
end
answer[2] = stepped
return answer
