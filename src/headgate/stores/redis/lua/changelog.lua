-- The change log: a list of rows, one for each edit. After a compaction it begins with a snapshot: a row of the kind
-- 'snapshot', whose position is the number of edits that the snapshot stands for, then the rows of the snapshot.
--
-- KEYS: the list; the generation of the data.
-- ARGV: the verb; the expected generation, or nothing; the position that there is at least; then the verb's arguments.
-- The answer is nil, and nothing is done, if the generation is another or there is less. 'state' has no arguments; the
-- answer is the generation and the position.

local key, verb, expected = KEYS[1], ARGV[1], ARGV[2]

-- Where the snapshot ends: the position there, and the number of rows until then.
local function snapshot()
  local first = redis.call('LINDEX', key, 0)
  local readable, row = pcall(cjson.decode, first or '')
  if
    readable
    and type(row) == 'table'
    and row.kind == 'snapshot'
    and type(row.position) == 'number'
    and type(row.rows) == 'number'
  then
    return row.position, row.rows
  end
  return 0, 0
end

local before, rows = snapshot()
local last = before + redis.call('LLEN', key) - rows
local present = redis.call('GET', KEYS[2]) or ''

if verb == 'state' then
  return {present, last}
elseif expected ~= '' and (present ~= expected or last < tonumber(ARGV[3])) then
  return false
end

local function push(command, from)
  for i = from, #ARGV, 1000 do
    redis.call(command, key, unpack(ARGV, i, math.min(i + 999, #ARGV)))
  end
end

if verb == 'write' then  -- the rows of a change: record them and tell every node
  push('RPUSH', 4)
  last = last + #ARGV - 3
  redis.call('PUBLISH', key, last)
  return last
end

if verb == 'read' then  -- a position: the rows after it; all rows, if the snapshot stands for some of them
  local after = tonumber(ARGV[4])
  local known = after > 0 and after >= before and after <= last
  local from = known and rows + after - before or 0
  return {last, known and 1 or 0, redis.call('LRANGE', key, from, -1)}
end

-- compact: the first row that was read, the number of rows to replace, and the rows of the snapshot, last first.
if redis.call('LINDEX', key, 0) ~= ARGV[4] then
  return 0  -- another node has been quicker
end
redis.call('LTRIM', key, ARGV[5], -1)
push('LPUSH', 6)
return 1
