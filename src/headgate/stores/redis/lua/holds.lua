-- Holds: costs and slots that are reserved, and settled with what they really cost. The rules are in stores/holds.py.
--
-- Stored: a string for each hold: bytes for its state, for flags (see `save`) and for the number of asks; doubles for the
-- end of its lease (or when it was settled), and for how long it is remembered then; the cost of each ask in four bytes,
-- or a double if one needs more; a byte for the length of the digest of its shape, and that; two for the length of its
-- note, and that. While it is open, there follow a checksum of what its limits are, and for each limit that counts costs
-- a double that says where its charge was counted (-1: nowhere). If one was charged several times, there are instead the
-- number of charges as a byte, and two doubles for each: where, and the cost. The holds of a key that are open, or have
-- expired, are in a sorted set by the ends of their leases. If slots are counted, that is the set of the slots. Shapes are
-- stored once for all holds with the same root, by their digest.
--
-- The numbers of a request: seven doubles (whether costs are given; whether it is a cancel, was granted before (1), or is
-- granted whatever is left (2); the lease, or -1 for none; for how long a new hold is remembered; whether its costs come
-- back; a random number; and the checksum of its limits), the cost of each ask, the periods of budgets and meters, the
-- fields of meters, and the id; of a new hold also a double for how many may be open, its note, the digest of its shape,
-- and the shape, if it is to be stored. Its last keys are the sorted set and the string. The answer: the status; after
-- UNKNOWN, TOO_MANY, OTHER_LIMITS and UNCOUNTABLE nothing; else the state (and 8 if its costs come back), the microseconds
-- left, the number of asks, and the cost of each (and of an extension after FORCED what each was before); after HELD, KNOWN,
-- AS_NOW, DENIED and FORCED the reports of the limits.

local HEAD, MAX_CHARGES, SWEPT_ABOVE, SWEPT = 7, 32, 64, 60
local DENIED, HELD, UNKNOWN, OTHER_COSTS, ENDED, TOO_MANY = 0, 1, 2, 3, 4, 5
local AS_NOW, KNOWN = 6, 7 -- settled or found, with what is left now; held before, or extended
local OTHER_LIMITS, FORCED, UNCOUNTABLE = 8, 9, 10 -- the second: granted, though it would have been denied
local OPEN, SETTLED, CANCELLED, EXPIRED = 1, 2, 3, 4
local RELEASE, WIDE, SEVERAL, FORCE = 1, 2, 4, 8 -- flags
local NOWHERE = -1
local SHAPES_KEPT = 16 * 86400000 -- milliseconds

local function doubles(text, at, count)
  local found = { unpacked('<' .. string.rep('d', count), text, at) }
  found[count + 1] = nil
  return found
end

local function has(flags, flag)
  return flags % (2 * flag) >= flag
end

local function read_charges(held, limits)
  local at, stored, found = held.charges_at, held.stored, {}
  for i, limit in ipairs(limits) do
    local charges = {}
    if limit.kind.counts_costs then
      if held.several then
        local many = string.byte(stored, at)
        at = at + 1
        for j = 1, many do
          local mark, cost = unpacked('<dd', stored, at)
          charges[j], at = { mark = mark, cost = cost }, at + 16
        end
      else
        local mark = unpacked('<d', stored, at)
        charges[1], at = mark ~= NOWHERE and { mark = mark, cost = held.costs[limit.ask] } or nil, at + 8
      end
      for _, one in ipairs(charges) do
        if not (are_whole(one.mark, one.cost)) then
          error('attempt to read what is not ours')
        end
      end
    end
    found[i] = charges
  end
  if at ~= #stored + 1 then
    error('attempt to read what is not ours')
  end
  return found
end

local function read_record(stored)
  local state, flags, asks, finish, keep = unpacked('<BBBdd', stored)
  local width = has(flags, WIDE) and 8 or 4
  local costs = { unpacked('<' .. string.rep(width == 8 and 'd' or 'I4', asks), stored, 20) }
  costs[asks + 1] = nil
  local digest, note, at = unpacked('<Bc0I2c0', stored, 20 + width * asks)
  local rest = #stored + 1 - at - (state == OPEN and 4 or 0)
  if state < OPEN or state > CANCELLED or asks == 0 or not are_whole(finish, keep) or rest < 0
    or state == OPEN and not has(flags, SEVERAL) and rest % 8 > 0 or state ~= OPEN and rest > 0 then
    return nil
  end
  for _, cost in ipairs(costs) do
    if not are_whole(0, cost) then
      return nil
    end
  end
  return {
    stored = stored, state = state, release = has(flags, RELEASE), forced = has(flags, FORCE), finish = finish,
    keep = keep, costs = costs, digest = digest, note = note, several = has(flags, SEVERAL),
    limits = state == OPEN and unpacked('<I4', stored, at) or 0, charges_at = at + 4,
  }
end

-- The hold in a string; nil if that isn't ours.
local function read(stored)
  if type(stored) ~= 'string' then
    return nil
  end
  local fine, found = try(read_record, stored)
  return fine and found or nil
end

-- The beginning of the keys that are stored beside a hold.
local function beside(held)
  return string.sub(held.name, 1, (string.find(held.name, '}', 1, true)))
end

-- The hold that a request is about, with what is stored of it; nil if that isn't ours.
local function load(request, numbers, states, next_key)
  local held = { request = request, states = states, index = KEYS[next_key], name = KEYS[next_key + 1] }
  held.given, held.flag, held.lease, held.new_keep, held.new_release, held.base, held.limits =
    unpacked('<ddddddd', numbers)
  held.asked = doubles(numbers, 8 * HEAD + 1, request.asks)
  if request.verb == 'h' then
    held.id, held.most, held.note, held.digest, held.shape = unpacked('<I2c0dI2c0Bc0I4c0', numbers, request.texts_at)
  else
    held.id = unpacked('<I2c0', numbers, request.texts_at)
  end
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
  held.costs, held.charges, held.forced = found.costs, {}, found.forced
  held.note, held.digest = found.note, found.digest
  if held.state == OPEN then
    if found.limits ~= held.limits or #held.costs ~= request.asks then
      held.other_limits = true -- these don't know where it was counted
    else
      held.charges = read_charges(found, request.limits)
    end
  end
  return held
end

local function save(held)
  local costs, limits, several, largest = held.costs, held.request.limits, false, 0
  for _, cost in ipairs(costs) do
    largest = max(largest, cost)
  end
  for _, charges in ipairs(held.charges) do
    several = several or #charges > 1
  end
  local wide = largest >= 4294967296
  local flags = (held.release and RELEASE or 0) + (wide and WIDE or 0) + (several and SEVERAL or 0)
    + (held.forced and FORCE or 0)
  local stored = packed(
    '<BBBdd' .. string.rep(wide and 'd' or 'I4', #costs), held.state, flags, #costs, held.finish, held.keep,
    unpack(costs)
  ) .. packed('<Bc0I2c0', #held.digest, held.digest, #held.note, held.note)
  if held.state == OPEN then
    stored = stored .. packed('<I4', held.limits)
    for i, limit in ipairs(limits) do
      local charges = held.charges[i] or {}
      if limit.kind.counts_costs and several then
        stored = stored .. string.char(#charges)
        for _, one in ipairs(charges) do
          stored = stored .. packed('<dd', one.mark, one.cost)
        end
      elseif limit.kind.counts_costs then
        stored = stored .. packed('<d', charges[1] and charges[1].mark or NOWHERE)
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
  push(state_of(held) + (held.release and 8 or 0))
  push(held.state == OPEN and max(held.finish - now, 0) or 0)
  push(#held.costs)
  for _, cost in ipairs(held.costs) do
    push(cost)
  end
end

-- How much is left under each limit. `costs` are those that were denied; without them, 1 for what is next, or 0.
local function report(held, costs, cost)
  for i, limit in ipairs(held.request.limits) do
    limit.kind.report(held.states[i], limit, costs and costs[limit.ask] or cost)
  end
end

local function answer_with(held, status, costs, cost)
  put(held, status)
  report(held, costs, cost)
end

local function differ(one, other)
  for i = 1, #other do
    if one[i] ~= other[i] then
      return true
    end
  end
  return false
end

-- Whether each limit lets its cost pass, or at least so much. Slots are asked only for a new hold.
local function pass(held, costs, least, new)
  for i, limit in ipairs(held.request.limits) do
    if (new or not limit.kind.slots)
      and not limit.kind.passes(held.states[i], limit, max(costs[limit.ask], least)) then
      return false
    end
  end
  return true
end

-- Whether each cost can be counted as a whole. Those of a hold that `passed` can, but for meters.
local function countable(held, costs, passed)
  for i, limit in ipairs(held.request.limits) do
    local kind = limit.kind
    if kind.counts_costs and (kind.metered or not passed)
      and not kind.countable(held.states[i], limit, costs[limit.ask]) then
      return false
    end
  end
  return true
end

-- Spend costs, and add to the charges of a hold where they are counted.
local function charge(held, costs)
  for i, limit in ipairs(held.request.limits) do
    local kind, state, charges, cost = limit.kind, held.states[i], held.charges[i] or {}, costs[limit.ask]
    held.charges[i] = charges
    if kind.counts_costs and (cost > 0 or kind.dated and #charges == 0) then -- of a period even nothing is one charge
      kind.spend(state, limit, cost)
      local mark, last = kind.mark(state, held.base, limit), charges[MAX_CHARGES]
      if not last then
        last = { cost = cost, mark = mark }
        charges[#charges + 1] = last
      else
        if held.release then
          release().forget(state, last, MAX_CHARGES, held.id)
        end
        if kind.leave then
          kind.leave(state, mark)
        end
        last.cost = last.cost + cost
      end
      if held.release then
        release().expect(state, last, #charges, held.id, held.finish)
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

-- A hold in a set of slots that isn't its own index: what is beside the hold needs no more than the end of its name.
local function member_of(held, state)
  local start = beside(held)
  return string.sub(state.key, 1, #start) == start and string.sub(held.name, #start + 4) or held.name
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
        call('ZADD', state.key, digits(held.finish), member_of(held, state))
        keep_set(held, state.key)
        if change > 0 then
          limit.kind.sweep(state)
        end
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
  local card, granted, most = pcall('ZCARD', held.index), held.flag == 1, held.most
  if type(card) == 'table' then
    return push(-1)
  end
  if not granted and card >= most and call('ZCOUNT', held.index, '(' .. digits(now), '+inf') >= most then
    return push(TOO_MANY)
  end
  if held.digest ~= '' and held.shape == '' and call('EXISTS', beside(held) .. 'p1:' .. held.digest) == 0 then
    return push(-4) -- it was lost
  end
  held.state, held.release, held.finish, held.keep = OPEN, held.new_release == 1, now + held.lease, held.new_keep
  held.costs, held.charges, held.forced = held.asked, {}, held.flag == 2
  local passed, least = granted or pass(held, held.costs, 1, true), {}
  for i, cost in ipairs(held.costs) do
    least[i] = max(cost, 1)
  end
  if not passed and not held.forced then
    held.state = 0
    return answer_with(held, DENIED, least)
  elseif not granted and not countable(held, held.costs, passed) then
    return push(UNCOUNTABLE)
  elseif not passed then
    answer_with(held, FORCED, least) -- before anything is taken
  end
  charge(held, held.costs)
  lease(held, 1)
  save(held)
  if held.shape ~= '' then
    call('SET', beside(held) .. 'p1:' .. held.digest, held.shape, 'PX', SHAPES_KEPT)
  end
  sweep(held, card)
  if passed then
    answer_with(held, HELD, nil, 0)
  end
end

-- Count another cost under a limit than what is counted now. The newest charges are given back first.
local function correct(held, i, counted, actual)
  local limit, state, charges = held.request.limits[i], held.states[i], held.charges[i] or {}
  local excess, released = actual - counted, held.release and held.finish <= now
  local changed = excess ~= 0
  if excess > 0 then
    limit.kind.correct(state, limit, 0, excess, charges[1] and charges[1].mark or NOWHERE)
  end
  for j = #charges, 1, -1 do
    local one = charges[j]
    if excess < 0 then
      local given = min(one.cost, -excess)
      limit.kind.correct(state, limit, one.cost, one.cost - given, one.mark)
      excess = excess + given
    end
    if held.release and not released then
      release().forget(state, one, j, held.id)
    end
    if limit.kind.leave and not released then
      changed = limit.kind.leave(state, one.mark) or changed
    end
  end
  if changed then
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
        call('ZREM', state.key, member_of(held, state))
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
      for j, one in ipairs(limit.kind.counts_costs and held.charges[i] or {}) do
        release().expect(held.states[i], one, j, held.id, finish)
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
  local more, any, forced = {}, false, false
  for i, cost in ipairs(held.costs) do
    more[i] = held.given == 1 and max(held.asked[i] - cost, 0) or 0
    any = any or more[i] > 0
  end
  local costs, before = { unpack(held.costs) }, held.finish
  if any then
    if held.flag == 0 and not pass(held, more, 0, false) then
      if not held.forced then
        return answer_with(held, DENIED, more)
      end
      forced = true
    end
    if held.flag == 0 and not countable(held, more, not forced) then
      return push(UNCOUNTABLE)
    end
    for i, cost in ipairs(more) do
      held.costs[i] = costs[i] + cost
    end
  end
  held.finish = held.lease < 0 and before or held.lease == 0 and now or max(before, now + held.lease)
  if forced then
    put(held, FORCED)
    for _, cost in ipairs(costs) do
      push(cost)
    end
    report(held, more) -- before it is taken
  end
  if any then
    local finish = held.finish
    held.finish = before
    charge(held, more)
    held.finish = finish
    if not forced then
      answer_with(held, KNOWN, nil, 0) -- on what was added, before anything comes back
    end
  end
  if held.finish ~= before then
    move(held)
  end
  save(held)
  if held.digest ~= '' then
    call('PEXPIRE', beside(held) .. 'p1:' .. held.digest, SHAPES_KEPT)
  end
  if not any then
    answer_with(held, KNOWN, nil, 0)
  end
end

local verbs = { h = hold, t = settle, x = extend, q = function(held) answer_with(held, AS_NOW, nil, 1) end }

return {
  HEAD = HEAD,
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
