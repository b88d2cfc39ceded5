-- Holds that give back what they have taken when their lease ends.
--
-- Stored beside what counts it: a sorted set with a member for each charge (its cost and where it was counted, as two
-- doubles, its number as a byte, the field of a meter, and the id of the hold), by the end of the lease. Whoever loads the
-- count gives back what is due first.

local AT_ONCE = 400 -- charges, or entries of a window that are moved for them

local function name_of(state)
  local name = state.key
  local place = string.find(name, '}', 1, true)
  if string.sub(name, place + 1, place + 1) == '/' then
    place = string.find(name, '}', place + 1, true) -- of a key that is stored beside its root
  end
  return string.sub(name, 1, place) .. 'r1:' .. string.sub(name, place + 1)
end

local function member(state, charge, number, id)
  local field = state.field and packed('<I2c0', #state.field, state.field) or ''
  return packed('<ddB', charge.cost, charge.mark, number) .. field .. id
end

-- Give back what is due, and return whether more is.
local function give_back(kind, state, limit)
  local name = name_of(state)
  local due = call('ZRANGEBYSCORE', name, '-inf', digits(now), 'LIMIT', 0, AT_ONCE)
  local done, work = 0, 0
  while done < #due and work < AT_ONCE do
    done = done + 1
    local cost, mark = unpacked('<dd', due[done])
    work = work + 1 + (kind.correct(state, limit, cost, 0, mark, due[done]) or 0)
    if kind.leave then
      kind.leave(state, mark)
    end
  end
  if done > 0 then
    call('ZREMRANGEBYRANK', name, 0, done - 1)
  end
  state.due = tonumber(call('ZRANGE', name, 0, 0, 'WITHSCORES')[2])
  kind.save(state, limit)
  return state.due and state.due <= now
end

-- Let a charge be given back at the end of a lease.
local function expect(state, charge, number, id, finish)
  call('ZADD', name_of(state), digits(finish), member(state, charge, number, id))
  state.due = min(state.due or LARGEST, finish)
end

-- Keep them as long as the count: without it there is nothing to be given back.
local function keep(state, expiry)
  call('PEXPIRE', name_of(state), expiry)
end

-- Without the count.
local function drop(state)
  call('DEL', name_of(state))
  state.due = nil
end

local function forget(state, charge, number, id)
  call('ZREM', name_of(state), member(state, charge, number, id))
end

return { name_of = name_of, give_back = give_back, expect = expect, keep = keep, drop = drop, forget = forget }
