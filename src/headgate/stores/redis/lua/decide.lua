-- Carries out requests that aren't plain, one after the other, all in one atomic step and at one moment.

-- Unlimited, or blocked: there is nothing to store.
local function fixed()
  local function nothing() end
  return {
    numbers = '<d', read = function(capacity) return { capacity = capacity, keyless = true } end,
    load = function() return {} end, passes = function(_, limit) return limit.capacity > 0 end,
    spend = nothing, refund = nothing, save = nothing, report = nothing, counts = nothing, forget = nothing,
  }
end

-- A key by itself: the open holds of a key, which are forgotten with it; or one that says which server is asked.
local function lone()
  return {
    numbers = '<', read = function() return {} end, load = function(_, key) return { key = key } end,
    counts = function() end, forget = function(state) call('DEL', state.key) end,
  }
end

local kinds, known, offences = {}, {}, nil
local modules = { b = bucket, w = window, f = fixed, c = budget, s = slots, m = meter, n = lone }

local function read(text)
  local request, at = { text = text, verb = string.sub(text, 1, 1), limits = {}, width = 0, asks = 0 }, 2
  request.on_hold = string.find('htxq', request.verb, 1, true)
  while at <= #text do
    local letter = string.sub(text, at, at)
    if letter == 'o' then
      offences = offences or violations()
      request.backoff, at = offences.read(text, at + 1)
      request.width = request.width + 1
    elseif letter == 'i' then
      request.remembered, at = unpacked('<d', text, at + 1), at + 9
      request.width = request.width + 1
    elseif letter == 'a' then
      request.asks, at = request.asks + 1, at + 1
    else
      local kind = kinds[letter] or modules[letter]()
      kinds[letter] = kind
      local limit = kind.read(unpacked(kind.numbers, text, at + 1))
      limit.kind, at = kind, at + 1 + 8 * (#kind.numbers - 1)
      limit.ask = request.asks
      request.limits[#request.limits + 1] = limit
      request.periods = request.periods or limit.calendar
      request.width = request.width + (limit.keyless and 0 or 1)
    end
  end
  if request.on_hold then
    request.width = request.width + 2
  end
  known[text] = request
  return request
end

-- Check, peek, charge or refund: all limits together or none. Return whether anything was counted.
local function apply(verb, limits, backoff, costs, states, offender)
  local passed = not offender or not offences.blocks(offender, backoff)
  for i = 1, #limits do
    passed = passed and limits[i].kind.passes(states[i], limits[i], costs[i])
  end
  push(passed and 1 or 0)
  local spends, refunds = verb == 'g' or (verb == 'c' and passed), verb == 'r'
  for i = 1, #limits do
    local limit, state, cost = limits[i], states[i], costs[i]
    local kind = limit.kind
    if spends then
      kind.spend(state, limit, cost)
    elseif refunds then
      kind.refund(state, limit, cost)
    end
    if spends or refunds or state.changed then
      kind.save(state, limit)
    end
    kind.report(state, limit, verb == 'c' and passed and 0 or (verb == 'g' or refunds) and 1 or cost)
  end
  if offender then
    offences.report(offender, verb == 'c' and not passed and offences.record(offender, backoff, 1) or 0)
  end
  return spends or refunds
end

local function perform(request, numbers, states, offender, next_key)
  local verb, limits, backoff = request.verb, request.limits, request.backoff
  if verb == 'o' then
    local alert = offences.record(offender, backoff, tonumber(numbers))
    push(1)
    offences.report(offender, alert)
  elseif verb == 's' then
    push(1)
    offences.report(offender, 0)
  elseif verb == 'f' then
    local counted = offender and offences.forget(offender, backoff)
    for i = 1, #limits do
      counted = limits[i].kind.counts(states[i], limits[i]) or counted
      if states[i].due then
        release().drop(states[i])
      end
      limits[i].kind.forget(states[i], limits[i])
    end
    push(counted and 1 or 0)
  elseif verb == 'y' then -- the time alone
    push(1)
  elseif request.on_hold then
    holds().perform(request, numbers, states, next_key)
  elseif verb == 'l' then
    local granted = draw_ahead().draw(limits[1].kind, states[1], limits[1], unpacked('<dddddd', numbers))
    push(granted and 1 or 0)
    limits[1].kind.report(states[1])
    push(granted or 0)
    if offender then
      offences.report(offender, not granted and offences.record(offender, backoff, 1) or 0)
    end
  else
    local costs = (#limits > 1 or request.periods) and { unpacked('<' .. string.rep('d', #limits), numbers) }
      or { tonumber(numbers) }
    return apply(verb, limits, backoff, costs, states, offender)
  end
end

-- A request's id is stored with its spec, when it was carried out, and the answer. Give that answer again, if it isn't too
-- old. Return nil if something else is stored.
local function repeated(request, name)
  local stored, text = pcall('GET', name), request.text
  if not stored then
    return false
  elseif type(stored) ~= 'string' or string.sub(stored, 1, #text) ~= text or (#stored - #text) % 8 ~= 0 then
    return nil
  elseif now - unpacked('<d', stored, #text + 1) >= request.remembered then
    return false
  end
  for at = #text + 9, #stored, 8 do
    push((unpacked('<d', stored, at)))
  end
  return true
end

local function remember(request, name, first)
  local stored = request.text .. packed('<d', now)
  for i = first, length do
    stored = stored .. packed('<d', answer[i])
  end
  call('SET', name, stored, 'PX', milliseconds(request.remembered))
end

-- Find the periods of budgets: their starts come after the costs; and then the fields of meters, where the verb has any.
-- Return whether this moment is in none of the periods.
local function outside(request, numbers)
  local limits, found = request.limits, false
  local at = request.verb == 'f' and 1 or 8 * (request.on_hold and holds().HEAD + request.asks or #limits) + 1
  for i = 1, #limits do
    if limits[i].calendar then
      limits[i].kind.find(limits[i], unpacked('<ddddd', numbers, at))
      at, found = at + 40, found or limits[i].outside
    end
  end
  for i = 1, request.verb == 'f' and 0 or #limits do
    if limits[i].kind.metered then
      limits[i].field, at = unpacked('<I2c0', numbers, at)
    end
  end
  request.texts_at = at
  return found
end

local function carry_out(request, numbers, next_key)
  local limits, states, offender, first, again = request.limits, {}, nil, length + 1, false
  if (request.periods or request.on_hold) and outside(request, numbers) then
    return push(-2)
  end
  for i = 1, #limits do
    local limit = limits[i]
    local state = limit.kind.load(limit, KEYS[next_key])
    next_key = limit.keyless and next_key or next_key + 1
    if not state then
      return push(-1)
    elseif state.due and state.due <= now then
      again = release().give_back(limit.kind, state, limit) or again
    end
    if state.changed and request.on_hold then
      limit.kind.save(state, limit)
    end
    states[i] = state
  end
  if again then
    return push(-3)
  end
  if request.backoff then
    offender = offences.load(KEYS[next_key], request.backoff)
    next_key = next_key + 1
    if not offender then
      return push(-1)
    end
  end
  if not request.remembered then
    perform(request, numbers, states, offender, next_key)
    return
  end
  local before = repeated(request, KEYS[next_key])
  if before == nil then
    push(-1)
  elseif not before and perform(request, numbers, states, offender) then
    remember(request, KEYS[next_key], first)
  end
end

-- Carry out a request, and return the number of its keys.
return function(text, numbers, next_key)
  local request, before = known[text] or read(text), length
  local fine, problem = try(carry_out, request, numbers, next_key)
  if not fine then
    local said = type(problem) == 'table' and problem.err or problem
    if not string.find(said, 'attempt to', 1, true) then
      error(problem) -- the server's: it is out of memory, or read-only
    end
    for i = before + 1, length do
      answer[i] = nil
    end
    length = before -- something inside isn't ours: that is no reason to fail the others
    push(-1)
  end
  return request.width
end
