-- Slots: so many holds at once, each until it is settled or its lease ends.
--
-- Stored: a sorted set of holds, by the end of their leases in microseconds. One that has ended doesn't count.

local SWEPT = 60 -- at once

local function nothing() end

local function load(_, key)
  local used = pcall('ZCOUNT', key, '(' .. digits(now), '+inf')
  if type(used) == 'table' then
    return nil
  end
  return { key = key, used = used }
end

-- The slots in use; the end of a lease that frees one, if none is free; and the last end.
local function report(slots, limit)
  local used, first, last = slots.used, 0, 0
  if used > 0 then
    last = tonumber(call('ZREVRANGE', slots.key, 0, 0, 'WITHSCORES')[2])
    if used >= limit.count then
      local before = used - limit.count -- that have to end, too
      first = call('ZRANGEBYSCORE', slots.key, '(' .. digits(now), '+inf', 'WITHSCORES', 'LIMIT', before, 1)[2]
    end
  end
  push(used)
  push(tonumber(first))
  push(last)
end

-- Drop a few that have ended: such a lease can't be renewed any more.
local function sweep(slots)
  local ended = now % 4 == 0 and call('ZCARD', slots.key) - slots.used or 0 -- not every time
  if ended > 0 then
    call('ZREMRANGEBYRANK', slots.key, 0, min(ended, SWEPT) - 1)
  end
end

return {
  numbers = '<d', slots = true, sweep = sweep,
  read = function(count) return { count = count } end,
  load = load, report = report,
  passes = function(slots, limit) return slots.used < limit.count end,
  spend = nothing, refund = nothing, save = nothing, correct = nothing,
  counts = function(slots) return slots.used > 0 end,
  forget = function(slots) call('DEL', slots.key) end,
}
