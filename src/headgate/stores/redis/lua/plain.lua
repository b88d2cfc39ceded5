-- Plain requests: a check of one token bucket, or of several, of which no tokens were drawn ahead or are held, at a tick of a
-- microsecond. Nearly all requests are plain. This is the work of bucket.lua without its tables and functions; all other
-- requests are left to others.

local WIDTH = 41 -- of a bucket in a spec

local next_key = 1
local check_all, headroom, rooms, lean, others, lone, several, decide -- functions that are made when they are needed
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
      check_all = check_all or check_all_lua
      width = check_all(text, numbers, next_key)
    end
  end
  if not width then
    headroom = headroom or function()
      rooms = rooms or headroom_lua()
      return rooms
    end
    if verb == 'H' or verb == 'T' then
      lean = lean or lean_lua
      if text == 'Hb' or text == 'Tb' then
        lone = lone or lean(1)
        width = lone(verb, numbers, next_key) and 3
      else
        several = several or lean(2)
        width = several(verb, text, numbers, next_key, position)
      end
      if not width then -- it isn't simple
        width = 2
        for i = 2, #text do
          width = width + (string.byte(text, i) == 102 and 0 or 1)
        end
        length = length + 1
        answer[length] = -4
      end
    else
      decide = decide or decide_lua()
      width = decide(text, numbers, next_key)
    end
  end
  next_key = next_key + width
end
answer[2] = stepped
return answer
