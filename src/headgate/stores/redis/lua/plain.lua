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

local next_key, simple, other = 1, nil, nil
for position = 3, #ARGV, 2 do
  local text, numbers, width = ARGV[position], ARGV[position + 1], nil
  local verb = string.sub(text, 1, 1)
  if verb == 'c' then
    if #text == 42 and string.sub(text, 2, 2) == 'b' and plain(text, numbers, KEYS[next_key]) then
      width = 1
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
