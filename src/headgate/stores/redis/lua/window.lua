-- Sliding windows: an exact log of costs and their times.
--
-- Stored: a list of whole numbers. First the longest window that was asked for in microseconds, and the sum of all
-- costs that have left it; then for each moment at which something was spent the time, and the sum of all costs up to
-- it. Cutting off what has left makes the last sum that is cut the first one that stays. The first number is negative
-- while holds may give back what they have taken.

local MOST_AFTER = 1000 -- entries behind one that is corrected; with more, it stays as it is

-- The entries are counted from 1. Their times and sums are read as they are needed: few are.
local function time_of(log, entry) return tonumber(call('LINDEX', log.key, 2 * entry)) end
local function sum_of(log, entry) return tonumber(call('LINDEX', log.key, 2 * entry + 1)) end

-- The first entry from `low` on for which `holds` is true, known to be true of `high`. It is looked for close to `low`.
local function first_entry(low, high, holds)
  local step = 1
  while low + step <= high do
    local probe = low + step - 1
    if holds(probe) then
      high = probe
      break
    end
    low, step = probe + 1, step * 2
  end
  while low < high do
    local middle = floor((low + high) / 2)
    if holds(middle) then high = middle else low = middle + 1 end
  end
  return low
end

-- How many entries have left a span.
local function left(log, span)
  if log.count == 0 or log.oldest > now - span then
    return 0
  elseif log.newest <= now - span then
    return log.count
  end
  return first_entry(1, log.count, function(entry) return time_of(log, entry) > now - span end) - 1
end

-- Find the part of the log that is in the limit's window.
local function look(log, limit)
  log.gone = left(log, limit.span)
  log.before = log.gone == 0 and log.base or log.gone == log.count and log.total or sum_of(log, log.gone)
  log.used = log.total - log.before
end

-- Count the sums from 0 again, and move the times back: after the clock stepped back, or sums have grown too large.
local function rewrite(log, shift)
  local numbers = call('LRANGE', log.key, 0, -1)
  local base = tonumber(numbers[2])
  for i = 2, #numbers do
    numbers[i] = digits(numbers[i] - (i % 2 == 1 and shift or base))
  end
  call('DEL', log.key)
  for first = 1, #numbers, 1000 do
    call('RPUSH', log.key, unpack(numbers, first, min(first + 999, #numbers)))
  end
  log.total, log.base = log.total - base, 0
  log.oldest, log.newest = log.oldest - shift, log.newest - shift
  call('PEXPIRE', log.key, milliseconds(log.newest + log.horizon - now))
end

local function load(limit, key)
  local size = pcall('LLEN', key)
  if type(size) == 'table' then
    return nil
  end
  local log = { key = key, horizon = limit.span, sign = 1, count = 0, base = 0, total = 0, gone = 0, before = 0, used = 0 }
  if size == 0 then
    return log
  end
  local head, tail = call('LRANGE', key, 0, 2), call('LRANGE', key, -2, -1)
  local horizon, base, oldest = tonumber(head[1]), tonumber(head[2]), tonumber(head[3])
  local newest, total = tonumber(tail[1]), tonumber(tail[2])
  if horizon and horizon < 0 then
    horizon, log.sign, log.due = -horizon, -1, 0
  end
  if size < 4 or size % 2 == 1 or not (horizon and base and oldest and newest and total)
    or not (are_whole(horizon, base) and are_whole(newest, total) and oldest <= newest and base < total) then
    return nil
  end
  log.horizon, log.known, log.count = max(horizon, limit.span), horizon, (size - 2) / 2
  log.base, log.oldest, log.newest, log.total = base, oldest, newest, total
  if newest - now >= patience then
    rewrite(log, newest - now)
    stepped = 1
  end
  look(log, limit)
  return log
end

local function passes(log, limit, cost)
  return log.used + cost <= limit.capacity
end

local function drop(log)
  call('DEL', log.key)
  log.known, log.count, log.base, log.total = nil, 0, 0, 0
end

-- Drop the entries that have left the longest window.
local function cut(log, limit)
  local gone = log.horizon == limit.span and log.gone or left(log, log.horizon)
  if gone > 0 and gone == log.count then
    drop(log)
  elseif gone > 0 then
    log.base = sum_of(log, gone)
    call('LTRIM', log.key, 2 * gone + 1, -1)
    call('LPUSH', log.key, digits(log.sign * log.horizon))
    log.known, log.count, log.oldest = log.horizon, log.count - gone, time_of(log, 1)
  end
end

local function countable(log, _, cost)
  return cost <= LARGEST - log.used
end

local function spend(log, limit, cost)
  cut(log, limit)
  local taken = min(cost, LARGEST - (log.total - log.base))
  if taken == 0 then
    return look(log, limit)
  end
  if log.count > 0 and log.total + taken > LARGEST then
    rewrite(log, 0)
  end
  local total = log.total + taken
  if log.count == 0 then
    call('RPUSH', log.key, digits(log.sign * log.horizon), '0', digits(now), digits(total))
    log.known, log.count, log.oldest, log.newest = log.horizon, 1, now, now
  elseif log.newest >= now then
    call('LSET', log.key, -1, digits(total))
  else
    call('RPUSH', log.key, digits(now), digits(total))
    log.count, log.newest = log.count + 1, now
  end
  if log.known ~= log.horizon then
    call('LSET', log.key, 0, digits(log.sign * log.horizon))
  end
  log.total = total
  look(log, limit)
end

-- The newest are given back first.
local function refund(log, limit, cost)
  local target = log.total - min(cost, log.used)
  if log.used == 0 then
    return
  elseif target > log.before then
    local last = first_entry(log.gone + 1, log.count, function(entry) return sum_of(log, entry) >= target end)
    call('LTRIM', log.key, 0, 2 * last + 1)
    call('LSET', log.key, -1, digits(target))
    log.count, log.newest, log.total = last, time_of(log, last), target
  elseif log.gone > 0 then
    call('LTRIM', log.key, 0, 2 * log.gone + 1)
    log.count, log.newest, log.total = log.gone, time_of(log, log.gone), target
  else
    drop(log)
  end
  look(log, limit)
end

-- Take a cost out of the entry of a moment, if that is still there. Return how much work it was.
local function give_back(log, limit, cost, moment)
  if log.gone == log.count or log.newest < moment then
    return 0
  end
  local entry = first_entry(log.gone + 1, log.count, function(one) return time_of(log, one) >= moment end)
  if time_of(log, entry) ~= moment or log.count - entry > MOST_AFTER then
    return 0
  end
  local before = entry == log.gone + 1 and log.before or sum_of(log, entry - 1)
  local rest = call('LRANGE', log.key, 2 * entry, -1)
  local given = min(cost, rest[2] - before)
  for i = 2, #rest, 2 do
    rest[i] = digits(rest[i] - given)
  end
  local from = tonumber(rest[2]) == before and 3 or 1
  if from == 3 and log.count == 1 then
    drop(log)
  else
    call('LTRIM', log.key, 0, 2 * entry - 1)
    for first = from, #rest, 1000 do
      call('RPUSH', log.key, unpack(rest, first, min(first + 999, #rest)))
    end
    log.count, log.total = log.count - (from - 1) / 2, log.total - given
    log.oldest, log.newest = time_of(log, 1), time_of(log, log.count)
  end
  look(log, limit)
  return #rest / 2
end

local function correct(log, limit, held, actual, moment)
  if actual > held then
    spend(log, limit, actual - held)
  elseif actual < held then
    return give_back(log, limit, held - actual, moment)
  end
end

local function save(log)
  if log.count == 0 then
    return log.due and release().drop(log)
  elseif (log.sign == -1) ~= (log.due ~= nil) then
    log.sign = -log.sign
    call('LSET', log.key, 0, digits(log.sign * log.horizon))
  end
  local expiry = milliseconds(log.newest + log.horizon - now)
  call('PEXPIRE', log.key, expiry)
  if log.due then
    release().keep(log, expiry)
  end
end

-- The used cost, the wait until enough has left for `cost` (or until the first has left, if that is asked for, and where
-- there is none until one of this moment would have), and the newest time; 0 where there is none.
local function report(log, limit, cost)
  local frees, excess = 0, log.used - (limit.capacity - cost) -- so, since their sum may pass 2^53
  if excess > 0 and limit.first then
    frees = (log.used > 0 and time_of(log, log.gone + 1) - now or 0) + limit.span -- not the moment, which may pass 2^53
  elseif excess > 0 and cost <= limit.capacity then
    local target = log.before + excess
    local entry = first_entry(log.gone + 1, log.count, function(one) return sum_of(log, one) >= target end)
    frees = time_of(log, entry) - now + limit.span
  end
  push(log.used)
  push(frees)
  push(log.used > 0 and log.newest or 0)
end

return {
  numbers = '<ddd',
  read = function(capacity, span, first) return { capacity = capacity, span = span, first = first == 1 } end,
  load = load, passes = passes, countable = countable, spend = spend, refund = refund, save = save, report = report,
  counts = function(log) return log.used > 0 end,
  forget = function(log) call('DEL', log.key) end,
  mark = function(log) return log.count > 0 and log.newest or 0 end,
  correct = correct, counts_costs = true,
}
