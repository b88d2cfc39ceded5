-- Agents and the digests of their tokens, changed in one step.
--
-- KEYS: the agents (a hash: when each was registered, a space, and the digest of its token or nothing); the owners of
-- digests (a hash); the names (a sorted set, all with score 0); invitations (a hash: when each was made, by digest);
-- when tokens were changed last (a sorted set, microseconds that only go forward); the generation of the data.
-- ARGV: the expected generation, or nothing; the verb and the agent; then the verb's arguments.
-- The answer is a list: the outcome, and the time if the agent's token was changed. It is nil, and nothing is done, if
-- the generation is another.

local agents, owners, names, invitations, changes, generation = unpack(KEYS)
local expected, verb, agent, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local call = redis.call

if expected ~= '' and call('GET', generation) ~= expected then
  return false
end

local function add(at, invitation, most)
  if invitation ~= '' and call('HEXISTS', invitations, invitation) == 0 then
    return { 'uninvited', '' }
  elseif call('HEXISTS', agents, agent) == 1 then
    return { 'exists', '' }
  elseif most ~= '' and call('HLEN', agents) >= tonumber(most) then
    return { 'full', '' }
  end
  if invitation ~= '' then
    call('HDEL', invitations, invitation)
  end
  call('HSET', agents, agent, at .. ' ' .. digest)
  call('HSET', owners, digest, agent)
  call('ZADD', names, 0, agent)
  return { 'done', '' }
end

local function replace(revoked_too, channel)
  local found = call('HGET', agents, agent)
  if not found then
    return { 'unknown', '' }
  end
  local at, old = string.match(found, '^(%S+) (%x*)$')
  if not at then -- unreadable: the name stays taken, as if the token were revoked
    at, old = '0', ''
  end
  if old == '' and revoked_too == '' then
    return { 'revoked', '' }
  end
  if old ~= '' then
    call('HDEL', owners, old)
  end
  if digest ~= '' then
    call('HSET', owners, digest, agent)
  end
  call('HSET', agents, agent, at .. ' ' .. digest)
  local time, newest = call('TIME'), call('ZREVRANGE', changes, 0, 0, 'WITHSCORES')
  local now = string.format('%.0f', math.max(time[1] * 1000000 + time[2], (tonumber(newest[2]) or 0) + 1))
  call('ZADD', changes, now, agent)
  call('PUBLISH', channel, now .. ' ' .. agent)
  return { 'done', now }
end

if verb == 'invite' then
  call('HSET', invitations, digest, ARGV[5])
  return { 'done', '' }
elseif verb == 'add' then
  return add(ARGV[5], ARGV[6], ARGV[7])
end
return replace(ARGV[5], ARGV[6])
