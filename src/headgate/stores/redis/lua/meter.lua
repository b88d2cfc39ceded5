-- Meters: what was used on each day, without a limit. The rules are those of `Meter` in meter.py.
--
-- Stored beside their root: a hash for each day, with what was used under each key; and a sorted set of the days, by their
-- starts, with the zone before each. The caller sends the periods of the calendar as for budgets.

local KEPT = 34560000000000 -- microseconds

-- Count so much more on a day, or less, unless that is too long ago.
local function count(meter, limit, field, start, cost)
  if cost == 0 or start <= now + limit.ahead - KEPT then
    return
  end
  local day = digits(start)
  local name, expiry = meter.key .. day, milliseconds(start + KEPT - now - limit.ahead)
  local used = pcall('HINCRBY', name, field, digits(cost))
  if type(used) == 'table' then
    return -- it isn't ours
  elseif used == cost then -- the first of its key on this day
    call('PEXPIRE', name, expiry)
    call('ZADD', meter.days, day, meter.zone .. day)
    call('ZREMRANGEBYSCORE', meter.days, '-inf', digits(now + limit.ahead - KEPT))
    call('PEXPIRE', meter.days, expiry)
  end
  if used <= 0 then
    call('HDEL', name, field)
  end
end

local function load(limit, key)
  local place = string.find(key, '}', 1, true)
  local zone, name = string.match(key, '^m1:([^:]*:)(.*):$', place + 1)
  local meter = { key = key, field = limit.field, zone = zone, days = string.sub(key, 1, place) .. 'u1:' .. name }
  local counted, days = pcall('HLEN', key .. digits(limit.start)), pcall('ZCARD', meter.days)
  local due = pcall('ZRANGE', release().name_of(meter), 0, 0, 'WITHSCORES')
  if type(counted) == 'table' or type(days) == 'table' or due.err then
    return nil
  end
  meter.due = tonumber(due[2])
  return meter
end

local function nothing() end

local function save(meter)
  if meter.due then
    release().keep(meter, milliseconds(KEPT))
  end
end

return {
  numbers = '<', counts_costs = true, dated = true, metered = true,
  read = function() return { calendar = true } end,
  find = function(limit, ahead, ...)
    limit.ahead = ahead
    budget().find(limit, ahead, ...)
  end,
  load = load, save = save, report = nothing, counts = nothing, forget = nothing,
  passes = function() return true end,
  countable = function(meter, limit, cost)
    local used = pcall('HGET', meter.key .. digits(limit.start), meter.field)
    return cost <= LARGEST - (type(used) == 'string' and tonumber(used) or 0)
  end,
  spend = function(meter, limit, cost) count(meter, limit, meter.field, limit.start, cost) end,
  refund = function(meter, limit, cost) count(meter, limit, meter.field, limit.start, -cost) end,
  mark = function(_, _, limit) return limit.start end,
  correct = function(meter, limit, held, actual, mark, due) -- what is due says of which key it is
    count(meter, limit, due and unpacked('<I2c0', due, 18) or meter.field, mark, actual - held)
  end,
}
