-- Holds: costs and slots that are reserved, and settled with what they really cost. The rules are in stores/holds.py.
--
-- Stored: a string for each hold: bytes for its state, whether its costs come back, and the number of asks; doubles for
-- the end of its lease (or when it was settled), and for how long it is remembered then; a double for the cost of each
-- ask. While it is open, there follow a checksum of what its limits are, and for each limit the number of its charges
-- as a byte, and for each charge doubles: two that say where the limit has counted it, and the cost. The cost of the
-- last charge isn't stored: it is the rest. The holds of a key that are open, or have expired, are in a sorted set by
-- the ends of their leases. If slots are counted, that is the set of the slots.
--
-- The numbers of a request: seven doubles (whether costs are given; whether it is a cancel, or was granted before; the
-- lease, or -1 for none; for how long a new hold is remembered; whether its costs come back; a random number; and the
-- checksum of its limits), the cost of each ask, the periods of budgets, and the id. Its last keys are the sorted set
-- and the string. The answer: the status; after UNKNOWN, TOO_MANY and OTHER_LIMITS nothing; else the state, the
-- microseconds left, the number of asks, and the cost of each; after HELD, KNOWN, AS_NOW and DENIED the reports of the
-- limits.

local HEAD, MAX_OPEN, MAX_CHARGES, SWEPT_ABOVE, SWEPT = 7, 131072, 32, 64, 60
local DENIED, HELD, UNKNOWN, OTHER_COSTS, ENDED, TOO_MANY = 0, 1, 2, 3, 4, 5
local AS_NOW, KNOWN = 6, 7 -- settled or found, with what is left now; held before, or extended
local OTHER_LIMITS = 8
local NOTHING = string.rep('\0', 8) -- so that the cost of the last charge can be read, too
local OPEN, SETTLED, CANCELLED, EXPIRED = 1, 2, 3, 4

local function doubles(text, at, count)
  local found = { unpacked('<' .. string.rep('d', count), text, at) }
  found[count + 1] = nil
  return found
end

-- The charges under each limit; nil if they aren't ours. The cost of the last one isn't known yet.
local function read_charges(stored, at)
  local found = {}
  while at <= #stored do
    local charges, many = {}, string.byte(stored, at)
    local after = at + (many > 0 and 24 * many - 7 or 1)
    if many > MAX_CHARGES or after > #stored + 1 then
      return nil
    end
    for i = 1, many do
      local mark, serial, cost = unpacked('<ddd', stored .. NOTHING, at + 24 * i - 23)
      if not are_whole(mark, serial) or i < many and not (cost >= 0 and cost == floor(cost)) then
        return nil
      end
      charges[i] = { mark = mark, serial = serial, cost = cost }
    end
    found[#found + 1], at = charges, after
  end
  return found
end

-- The hold in a string; nil if that isn't ours.
local function read(stored)
  if type(stored) ~= 'string' or #stored < 27 then
    return nil
  end
  local state, released, asks, finish, keep = unpacked('<BBBdd', stored)
  local after = 20 + 8 * asks
  if state < OPEN or state > CANCELLED or asks == 0 or after > #stored + 1 or not are_whole(finish, keep) then
    return nil
  end
  local costs = doubles(stored, 20, asks)
  for _, cost in ipairs(costs) do
    if cost < 0 or cost ~= floor(cost) or cost == math.huge then
      return nil
    end
  end
  if state == OPEN and #stored < after + 3 then
    return nil
  end
  local limits = state == OPEN and unpacked('<I4', stored, after) or 0
  local charges = read_charges(stored, state == OPEN and after + 4 or after)
  return charges and {
    state = state, release = released == 1, finish = finish, keep = keep, costs = costs, limits = limits,
    charges = charges,
  }
end

-- The hold that a request is about, with what is stored of it; nil if that isn't ours.
local function load(request, numbers, states, next_key)
  local held = { request = request, states = states, index = KEYS[next_key], name = KEYS[next_key + 1] }
  held.given, held.flag, held.lease, held.new_keep, held.new_release, held.epoch, held.limits =
    unpacked('<ddddddd', numbers)
  held.asked = doubles(numbers, 8 * HEAD + 1, request.asks)
  local periods = 0
  for _, limit in ipairs(request.limits) do
    periods = periods + (limit.calendar and 1 or 0)
  end
  held.id = string.sub(numbers, 8 * (HEAD + request.asks + 5 * periods) + 1)
  local stored = pcall('GET', held.name)
  if not stored then
    return held
  end
  local found = read(stored)
  if not found then
    return nil
  elseif found.finish + found.keep <= now then
    return held -- it is forgotten
  end
  local listed = found.state ~= OPEN or pcall('ZSCORE', held.index, held.id)
  if type(listed) == 'table' then
    return nil
  elseif not listed then
    return held
  end
  held.state, held.release, held.finish, held.keep = found.state, found.release, found.finish, found.keep
  held.costs, held.charges = found.costs, found.charges
  if held.state == OPEN and (found.limits ~= held.limits or #held.charges ~= #request.limits) then
    held.charges, held.other_limits = {}, true -- these don't know where it was counted
  end
  for i, charges in ipairs(held.charges) do
    local cost = held.costs[request.limits[i].ask]
    for j, charge in ipairs(charges) do
      charge.cost = j == #charges and cost or charge.cost
      cost = cost - charge.cost
    end
  end
  return held
end

local function save(held)
  local costs = held.costs
  local stored = packed(
    '<BBBdd' .. string.rep('d', #costs), held.state, held.release and 1 or 0, #costs, held.finish, held.keep, unpack(costs)
  )
  if held.state == OPEN then
    stored = stored .. packed('<I4', held.limits)
    for i = 1, #held.request.limits do
      local charges = held.charges[i] or {}
      local last = charges[#charges]
      stored = stored .. string.char(#charges)
      for j = 1, #charges - 1 do
        stored = stored .. packed('<ddd', charges[j].mark, charges[j].serial, charges[j].cost)
      end
      if last then
        stored = stored .. packed('<dd', last.mark, last.serial)
      end
    end
  end
  call('SET', held.name, stored, 'PX', milliseconds(max(held.finish - now, 0) + held.keep))
end

local function state_of(held)
  return held.state == OPEN and held.finish <= now and EXPIRED or held.state
end

local function put(held, status)
  push(status)
  push(state_of(held))
  push(held.state == OPEN and max(held.finish - now, 0) or 0)
  push(#held.costs)
  for _, cost in ipairs(held.costs) do
    push(cost)
  end
end

-- Answer with how much is left. `costs` are those that were denied; without them, 1 for what is next, or 0.
local function answer_with(held, status, costs, cost)
  put(held, status)
  for i, limit in ipairs(held.request.limits) do
    limit.kind.report(held.states[i], limit, costs and costs[limit.ask] or cost)
  end
end

local function differ(one, other)
  for i = 1, #other do
    if one[i] ~= other[i] then
      return true
    end
  end
  return false
end

-- Whether each limit lets its cost pass. Slots are asked only for a new hold.
local function pass(held, costs, new)
  for i, limit in ipairs(held.request.limits) do
    if (new or not limit.kind.slots) and not limit.kind.passes(held.states[i], limit, costs[limit.ask]) then
      return false
    end
  end
  return true
end

-- Spend costs, and add to the charges of a hold where they are counted.
local function charge(held, costs)
  for i, limit in ipairs(held.request.limits) do
    local kind, state, charges = limit.kind, held.states[i], held.charges[i] or {}
    held.charges[i] = charges
    if kind.counts_costs then
      kind.spend(state, limit, costs[limit.ask])
      local mark, serial = kind.mark(state, held.epoch)
      serial = serial == 0 and #charges or serial -- so that no two are equal
      local last = charges[#charges]
      if held.release and last and #charges == MAX_CHARGES then
        release().forget(state, last, held.id)
      end
      if #charges < MAX_CHARGES then
        last = { cost = costs[limit.ask], mark = mark, serial = serial }
        charges[#charges + 1] = last
      else
        last.cost = last.cost + costs[limit.ask]
      end
      if held.release then
        release().expect(state, last, held.id, held.finish)
      end
      kind.save(state, limit)
    end
  end
end

-- Keep a sorted set as long as any of its holds is remembered, and up to a minute longer, so that it is seldom set.
local function keep_set(held, name)
  local expiry = milliseconds(held.finish - now + held.keep)
  if call('PTTL', name) < expiry then
    call('PEXPIRE', name, expiry + min(expiry, 60000))
  end
end

-- Let the lease end at its (new) time everywhere. `change` is by how much it changes the slots in use.
local function lease(held, change)
  call('ZADD', held.index, digits(held.finish), held.id)
  keep_set(held, held.index)
  for i, limit in ipairs(held.request.limits) do
    local state = held.states[i]
    if limit.kind.slots then
      state.used = state.used + change
      if state.key ~= held.index then
        call('ZADD', state.key, digits(held.finish), held.name)
        keep_set(held, state.key)
      end
    end
  end
end

-- Drop a few that are no longer remembered from a long list of holds.
local function sweep(held, card)
  if card <= SWEPT_ABOVE or now % 4 > 0 then -- not every time
    return
  end
  local prefix, gone = string.sub(held.name, 1, #held.name - #held.id), {}
  local ended = call('ZRANGEBYSCORE', held.index, '-inf', digits(now - held.keep), 'LIMIT', 0, SWEPT)
  for _, id in ipairs(ended) do
    if call('EXISTS', prefix .. id) == 0 then
      gone[#gone + 1] = id
    end
  end
  if #gone > 0 then
    call('ZREM', held.index, unpack(gone))
  end
end

local function hold(held)
  if held.state then
    if held.state == OPEN and differ(held.costs, held.asked) then
      return put(held, OTHER_COSTS)
    end
    return answer_with(held, KNOWN, nil, 0)
  end
  local card, granted = pcall('ZCARD', held.index), held.flag == 1
  if type(card) == 'table' then
    return push(-1)
  end
  if not granted and card >= MAX_OPEN and call('ZCOUNT', held.index, '(' .. digits(now), '+inf') >= MAX_OPEN then
    return push(TOO_MANY)
  end
  held.state, held.release, held.finish, held.keep = OPEN, held.new_release == 1, now + held.lease, held.new_keep
  held.costs, held.charges = held.asked, {}
  if not granted and not pass(held, held.costs, true) then
    held.state = 0
    return answer_with(held, DENIED, held.costs)
  end
  charge(held, held.costs)
  lease(held, 1)
  save(held)
  sweep(held, card)
  answer_with(held, HELD, nil, 0)
end

-- Count another cost under a limit than what is counted now. The newest charges are given back first.
local function correct(held, i, counted, actual)
  local limit, state, charges = held.request.limits[i], held.states[i], held.charges[i] or {}
  local excess = actual - counted
  if excess > 0 then
    local first = charges[1] or { mark = 0, serial = 0 }
    limit.kind.correct(state, limit, 0, excess, first.mark, first.serial)
  end
  for j = #charges, 1, -1 do
    local one = charges[j]
    if excess < 0 then
      local given = min(one.cost, -excess)
      limit.kind.correct(state, limit, one.cost, one.cost - given, one.mark, one.serial)
      excess = excess + given
    end
    if held.release and held.finish > now then
      release().forget(state, one, held.id)
    end
  end
  if actual ~= counted then
    limit.kind.save(state, limit)
  end
end

local function settle(held)
  local actual = held.given == 1 and held.asked or held.costs
  if held.state ~= OPEN then
    if differ(actual, held.costs) then
      return put(held, OTHER_COSTS)
    end
    return answer_with(held, AS_NOW, nil, 1)
  end
  local ended = held.finish <= now
  call('ZREM', held.index, held.id)
  for i, limit in ipairs(held.request.limits) do
    local state = held.states[i]
    if limit.kind.slots then
      if state.key ~= held.index then
        call('ZREM', state.key, held.name)
      end
      state.used = ended and state.used or state.used - 1
    elseif limit.kind.counts_costs then
      correct(held, i, held.release and ended and 0 or held.costs[limit.ask], actual[limit.ask])
    end
  end
  held.costs, held.state, held.finish = actual, held.flag == 1 and CANCELLED or SETTLED, now
  save(held)
  answer_with(held, AS_NOW, nil, 1)
end

-- Let the lease of an open hold end at its new time.
local function move(held)
  local finish = held.finish
  lease(held, finish <= now and -1 or 0)
  if held.release then
    for i, limit in ipairs(held.request.limits) do
      for _, one in ipairs(limit.kind.counts_costs and held.charges[i] or {}) do
        release().expect(held.states[i], one, held.id, finish)
      end
      if limit.kind.counts_costs and finish <= now then
        release().give_back(limit.kind, held.states[i], limit)
      elseif limit.kind.counts_costs then
        limit.kind.save(held.states[i], limit)
      end
    end
  end
end

local function extend(held)
  if state_of(held) ~= OPEN then
    return put(held, ENDED)
  end
  local more, any = {}, false
  for i, cost in ipairs(held.costs) do
    more[i] = held.given == 1 and max(held.asked[i] - cost, 0) or 0
    any = any or more[i] > 0
  end
  if any then
    if held.flag == 0 and not pass(held, more, false) then
      return answer_with(held, DENIED, more)
    end
    charge(held, more)
    for i, cost in ipairs(more) do
      held.costs[i] = held.costs[i] + cost
    end
  end
  local before = held.finish
  held.finish = held.lease < 0 and before or held.lease == 0 and now or max(before, now + held.lease)
  if any then
    answer_with(held, KNOWN, nil, 0) -- on what was added, before anything comes back
  end
  if held.finish ~= before then
    move(held)
  end
  save(held)
  if not any then
    answer_with(held, KNOWN, nil, 0)
  end
end

local verbs = { h = hold, t = settle, x = extend, q = function(held) answer_with(held, AS_NOW, nil, 1) end }

-- The state of a hold, the end of its lease, and its costs; 0 if it isn't remembered, or isn't ours.
local function list(name)
  local found = read(pcall('GET', name))
  if not found or found.finish + found.keep <= now then
    return push(0)
  end
  push(found.state)
  push(found.finish)
  push(#found.costs)
  for _, cost in ipairs(found.costs) do
    push(cost)
  end
end

return {
  HEAD = HEAD, list = list,
  perform = function(request, ...)
    local held = load(request, ...)
    if not held then
      push(-1)
    elseif not held.state and request.verb ~= 'h' then
      push(UNKNOWN)
    elseif held.state and #held.costs ~= request.asks then
      put(held, OTHER_COSTS)
    elseif held.other_limits and (request.verb == 't' or request.verb == 'x') then
      push(OTHER_LIMITS)
    else
      verbs[request.verb](held)
    end
  end,
}
