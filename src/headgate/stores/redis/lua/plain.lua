-- Plain requests: a check of one token bucket, or of several, of which no tokens were drawn ahead or are held, at a tick of a
-- microsecond. Nearly all requests are plain. This is the work of bucket.lua without its tables and functions; all other
-- requests are left to others.

local WIDTH = 41 -- of a bucket in a spec

-- A check of several buckets: all pass, or none is charged. Return their number; nil, and nothing is done, if one isn't plain.
local function check_all(text, numbers, next_key)
  local count, passes = (#text - 1) / WIDTH, true
  for i = 1, count do
    local at, key = 2 + WIDTH * (i - 1), KEYS[next_key + i - 1]
    if string.sub(text, at, at) ~= 'b' then
      return nil
    end
    local _, unit, gain, tick, full = unpacked('<ddddd', text, at + 1)
    local level, stored = full, pcall('GET', key)
    if tick ~= 1 then
      return nil
    elseif stored then
      if type(stored) ~= 'string' or #stored ~= 16 then
        return nil
      end
      local stamp
      level, stamp = unpacked('<dd', stored)
      local gained = (now - stamp) * gain
      if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST then
        return nil
      end
      level = min(level + gained, full)
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

local next_key, lone, several, other = 1, nil, nil, nil
for position = 3, #ARGV, 2 do
  local text, numbers, width = ARGV[position], ARGV[position + 1], nil
  local verb = string.sub(text, 1, 1)
  if verb == 'c' then
    if #text == 1 + WIDTH and string.sub(text, 2, 2) == 'b' then
      local _, unit, gain, tick, full = unpacked('<ddddd', text, 3)
      local key = KEYS[next_key]
      local level, stored = full, pcall('GET', key)
      width = tick == 1 and 1 or nil
      if stored and width then
        width = nil
        if type(stored) == 'string' and #stored == 16 then
          local stamp
          level, stamp = unpacked('<dd', stored)
          local gained = (now - stamp) * gain
          if are_whole(level, stamp) and level <= full and gained >= 0 and gained <= LARGEST then
            level, width = min(level + gained, full), 1
          end
        end
      end
      if width then
        local cost = tonumber(numbers)
        local passes = cost * unit <= level
        if passes then
          level = level - cost * unit
          call('SET', key, packed('<dd', level, now), 'PX', milliseconds((full - level) / gain))
        end
        answer[length + 1], answer[length + 2], answer[length + 3] = passes and 1 or 0, level, now
        length = length + 3
      end
    elseif #text % WIDTH == 1 then
      width = check_all(text, numbers, next_key)
    end
  elseif verb == 'H' or verb == 'T' then
    if text == 'Hb' or text == 'Tb' then
      lone = lone or lean(1)
      width = lone(verb, numbers, next_key) and 3
    else
      several = several or lean(2)
      width = several(verb, text, numbers, next_key)
    end
    if not width then -- it isn't simple
      width = 2
      for i = 2, #text do
        width = width + (string.byte(text, i) == 102 and 0 or 1)
      end
      length = length + 1
      answer[length] = -4
    end
  end
  if not width then
    other = other or decide()
    width = other(text, numbers, next_key)
  end
  next_key = next_key + width
end
answer[2] = stepped
return answer
