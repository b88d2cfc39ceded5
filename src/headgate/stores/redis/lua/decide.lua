-- What is asked, one request after the other, all in one atomic step and at one moment. It is the part for everything that
-- isn't plain.

-- Unlimited, or blocked: there is nothing to store.
local function fixed()
  local function nothing() end
  return {
    numbers = '<d', read = function(capacity) return { capacity = capacity, keyless = true } end,
    load = function() return {} end, passes = function(_, limit) return limit.capacity > 0 end,
    spend = nothing, refund = nothing, save = nothing, tell = nothing, counts = nothing, forget = nothing,
  }
end

local kinds, modules, known, offences = {}, { b = bucket, w = window, f = fixed }, {}, nil

local function read(text)
  local request, at = { text = text, verb = string.sub(text, 1, 1), limits = {}, width = 0 }, 2
  while at <= #text do
    local letter = string.sub(text, at, at)
    if letter == 'o' then
      offences = offences or violations()
      request.backoff, at = offences.read(text, at + 1)
      request.width = request.width + 1
    elseif letter == 'i' then
      request.remembered, at = unpacked('<d', text, at + 1), at + 9
      request.width = request.width + 1
    else
      local kind = kinds[letter] or modules[letter]()
      kinds[letter] = kind
      local limit = kind.read(unpacked(kind.numbers, text, at + 1))
      limit.kind, at = kind, at + 1 + 8 * (#kind.numbers - 1)
      request.limits[#request.limits + 1] = limit
      request.width = request.width + (limit.keyless and 0 or 1)
    end
  end
  known[text] = request
  return request
end

-- Check, peek, charge or refund: all limits together or none. Say whether anything was counted.
local function apply(verb, limits, backoff, costs, states, offender)
  local passed = not offender or not offences.holds_up(offender, backoff)
  for i = 1, #limits do
    passed = passed and limits[i].kind.passes(states[i], limits[i], costs[i])
  end
  say(passed and 1 or 0)
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
    kind.tell(state, limit, verb == 'c' and passed and 0 or (verb == 'g' or refunds) and 1 or cost)
  end
  if offender then
    offences.tell(offender, verb == 'c' and not passed and offences.record(offender, backoff, 1) or 0)
  end
  return spends or refunds
end

local function perform(request, numbers, states, offender)
  local verb, limits, backoff = request.verb, request.limits, request.backoff
  if verb == 'o' then
    local alert = offences.record(offender, backoff, tonumber(numbers))
    say(1)
    offences.tell(offender, alert)
  elseif verb == 's' then
    say(1)
    offences.tell(offender, 0)
  elseif verb == 'f' then
    local counted = offender and offences.forget(offender, backoff)
    for i = 1, #limits do
      counted = limits[i].kind.counts(states[i], limits[i]) or counted
      limits[i].kind.forget(states[i], limits[i])
    end
    say(counted and 1 or 0)
  elseif verb == 'l' then
    local granted = draw_ahead().draw(limits[1].kind, states[1], limits[1], unpacked('<dddddd', numbers))
    say(granted and 1 or 0)
    limits[1].kind.tell(states[1])
    say(granted or 0)
    if offender then
      offences.tell(offender, not granted and offences.record(offender, backoff, 1) or 0)
    end
  else
    local costs = { tonumber(numbers) }
    if #limits > 1 then
      costs = { unpacked('<' .. string.rep('d', #limits), numbers) }
    end
    return apply(verb, limits, backoff, costs, states, offender)
  end
end

-- A request's id is stored with what it was, when it was carried out, and what was said then. Say that again, if it isn't
-- too long ago. Return nil if something else is stored.
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
    say((unpacked('<d', stored, at)))
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

local function carry_out(request, numbers, next_key)
  local limits, states, offender, first = request.limits, {}, nil, length + 1
  for i = 1, #limits do
    local limit = limits[i]
    states[i] = limit.kind.load(limit, KEYS[next_key])
    next_key = limit.keyless and next_key or next_key + 1
    if not states[i] then
      return say(-1)
    end
  end
  if request.backoff then
    offender = offences.load(KEYS[next_key], request.backoff)
    next_key = next_key + 1
    if not offender then
      return say(-1)
    end
  end
  if not request.remembered then
    perform(request, numbers, states, offender)
    return
  end
  local before = repeated(request, KEYS[next_key])
  if before == nil then
    say(-1)
  elseif not before and perform(request, numbers, states, offender) then
    remember(request, KEYS[next_key], first)
  end
end

-- Carry out a request, and say how many keys it has.
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
    say(-1)
  end
  return request.width
end
