-- A check of several buckets: all pass, or none is charged. Return their number; nil, and nothing is done, if one isn't plain.

local text, numbers, next_key = ...

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
