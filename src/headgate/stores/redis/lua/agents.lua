-- Agents and the digests of their tokens, changed in one step.
--
-- KEYS: the agents (a hash: when each was registered, a space, and the digest of its token or nothing); the owners of
-- digests (a hash); the names (a sorted set, all with score 0); invitations (a hash by digest: when
-- each was made, and perhaps a space and a note);
-- when tokens were changed last (a sorted set, microseconds that only go forward); the generation of the data.
-- ARGV: the verb; the expected generation, or nothing; how many agents and which newest change there are at least; the
-- agent; then the verb's arguments. 'state' has none of them.
-- The answer is a list: the outcome, the time if the agent's token was changed, and the number of agents. It is nil, and
-- nothing is done, if the generation is another or there is less. The answer to 'state' is the generation, the number of
-- agents, and the newest change. Names stay taken, and times only go forward: smaller numbers are those of older data.

local agents, owners, names, invitations, changes, generation = unpack(KEYS)
local verb, expected, agent, digest = ARGV[1], ARGV[2], ARGV[5], ARGV[6]
local call = redis.call

local present = call('GET', generation) or ''
local count = math.min(call('HLEN', agents), call('ZCARD', names))
local newest = tonumber(call('ZREVRANGE', changes, 0, 0, 'WITHSCORES')[2]) or 0

if verb == 'state' then
  return { present, count, string.format('%.0f', newest) }
elseif expected ~= '' and (present ~= expected or count < tonumber(ARGV[3]) or newest < tonumber(ARGV[4])) then
  return false
end

local function add(at, invitation, most)
  if invitation ~= '' and call('HEXISTS', invitations, invitation) == 0 then
    return { 'uninvited', '', count }
  elseif call('HEXISTS', agents, agent) == 1 then
    return { 'exists', '', count }
  elseif most ~= '' and call('HLEN', agents) >= tonumber(most) then
    return { 'full', '', count }
  end
  if invitation ~= '' then
    call('HDEL', invitations, invitation)
  end
  call('HSET', agents, agent, at .. ' ' .. digest)
  call('HSET', owners, digest, agent)
  call('ZADD', names, 0, agent)
  return { 'done', '', count + 1 }
end

local function replace(known, channel)
  local found = call('HGET', agents, agent)
  if not found then
    return { 'unknown', '', count }
  end
  local at, old = string.match(found, '^(%S+) (%x*)$')
  if not at then -- unreadable: the name stays taken, as if the token were revoked
    at, old = '0', ''
  end
  if old == '' and (known ~= '' or digest == '') then
    return { 'revoked', '', count }
  elseif known ~= '' and known ~= old then
    return { 'other', '', count }
  end
  if old ~= '' then
    call('HDEL', owners, old)
  end
  if digest ~= '' then
    call('HSET', owners, digest, agent)
  end
  call('HSET', agents, agent, at .. ' ' .. digest)
  local time = call('TIME')
  local now = string.format('%.0f', math.max(time[1] * 1000000 + time[2], newest + 1))
  call('ZADD', changes, now, agent)
  call('PUBLISH', channel, now .. ' ' .. agent)
  return { 'done', now, count }
end

if verb == 'invite' then
  call('HSET', invitations, digest, ARGV[7])
  return { 'done', '', count }
elseif verb == 'add' then
  return add(ARGV[7], ARGV[8], ARGV[9])
end
return replace(ARGV[7], ARGV[8])
