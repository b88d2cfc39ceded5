-- Budgets: so much in each period of the calendar, or in all. The rules are those of `Budget` in budget.py.
--
-- Stored: a string of little-endian doubles, the start of the period in microseconds since 1970 and what is used in it;
-- then when the first of its holds gives back what it has taken, if any does. The caller knows the calendar, and sends
-- with each request what to add to the time to get that of day, and the starts of four periods around it.

local DAY, YEAR = 86400000000, 31536000000000

-- Find the period of this moment among the starts. Without a calendar there is only one, which never ends.
local function find(limit, ahead, ...)
  local starts, moment = { ... }, now + ahead
  limit.outside = true
  for i = 1, 3 do
    if starts[i] <= moment and moment < starts[i + 1] then
      limit.start, limit.finish, limit.outside = starts[i], starts[i + 1], false
      limit.lasts = (starts[i + 2] or starts[i + 1]) - moment -- a clock that stepped back may be in the next one
    end
  end
end

local function load(limit, key)
  local stored = pcall('GET', key)
  local budget = { key = key, start = 0, used = 0, known = stored and true }
  if stored then
    local size = type(stored) == 'string' and #stored or 0
    if size ~= 16 and size ~= 24 then
      return nil
    end
    budget.start, budget.used = unpacked('<dd', stored)
    budget.due = size == 24 and unpacked('<d', stored, 17) or nil
    if not are_whole(budget.start, budget.used) then
      return nil
    end
  end
  if limit.calendar then
    if budget.start < limit.start then
      budget.start, budget.used = limit.start, 0
    elseif budget.start > limit.finish then
      budget.start, budget.changed = limit.start, true
    end
  end
  return budget
end

local function save(budget, limit)
  if budget.used > 0 or budget.due then
    local stored, expiry = packed('<dd', budget.start, budget.used), limit.calendar and limit.lasts + DAY or YEAR
    expiry = milliseconds(expiry)
    if budget.due then
      stored = stored .. packed('<d', budget.due)
      release().keep(budget, expiry)
    end
    call('SET', budget.key, stored, 'PX', expiry)
    budget.known = true
  elseif budget.known then
    call('DEL', budget.key)
  end
end

-- Count so much more, or less.
local function count(budget, cost)
  budget.used = cost > LARGEST - budget.used and LARGEST or max(budget.used + cost, 0)
end

return {
  numbers = '<dd', counts_costs = true, dated = true,
  read = function(amount, calendar) return { amount = amount, calendar = calendar == 1 } end,
  find = find, load = load, save = save,
  passes = function(budget, limit, cost) return cost <= limit.amount - budget.used end,
  countable = function(budget, _, cost) return cost <= LARGEST - budget.used end,
  spend = function(budget, _, cost) count(budget, cost) end,
  refund = function(budget, _, cost) count(budget, -cost) end,
  mark = function(budget) return budget.start end,
  correct = function(budget, _, held, actual, mark)
    if budget.start == mark then
      count(budget, actual - held)
    end
  end,
  report = function(budget)
    push(budget.start)
    push(budget.used)
  end,
  counts = function(budget) return budget.used > 0 end,
  forget = function(budget) call('DEL', budget.key) end,
}
