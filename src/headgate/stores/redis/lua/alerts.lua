-- Open alerts: each is changed and ended in one step, by one hub.
--
-- KEYS: the open alerts (a hash: the text of each, by agent); the text of the one in question as it ended (a string).
-- ARGV: "put" or "end"; the agent; the known text that is replaced, or nothing; the new text, or the text at the end; the
-- largest number of open alerts; milliseconds without a change after which all is forgotten.
-- The answer is a list: "done"; or "other" and the text that is there, if it isn't the known one; "ended" and its text, if
-- the alert has ended and would be put anew; "full".

local open, ended = KEYS[1], KEYS[2]
local verb, agent, known, text, most, expiry = unpack(ARGV)
local call = redis.call

if known == '' then
  local before = call('GET', ended)
  if before then
    return { 'ended', before }
  end
end
local found = call('HGET', open, agent) or ''
if found ~= known then
  return { 'other', found }
end
if verb == 'end' then
  call('HDEL', open, agent)
  call('SET', ended, text, 'PX', expiry)
else
  if known == '' and call('HLEN', open) >= tonumber(most) then
    return { 'full', '' }
  end
  call('HSET', open, agent, text)
end
call('PEXPIRE', open, expiry)
return { 'done', '' }
