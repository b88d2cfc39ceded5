-- Violations: the consequences of repeated denials. The rules are those of `Backoff` in violations.py.
--
-- Stored: a string of little-endian doubles: the violations in a row, when an alert was last raised (0: never), and the
-- times of the newest, oldest first.

local function read(text, at)
  local quiet, window, after, enforce, count = unpacked('<ddddd', text, at)
  local backoff = { quiet = quiet, window = window, after = after, enforce = enforce == 1, steps = {} }
  for i = 1, count do
    backoff.steps[i] = unpacked('<d', text, at + 32 + 8 * i)
  end
  return backoff, at + 40 + 8 * count
end

local function save(offender, backoff)
  local stored, newest = packed('<dd', offender.count, offender.alerted), offender.newest
  for i = max(#newest - backoff.after, 0) + 1, #newest do
    stored = stored .. packed('<d', newest[i])
  end
  local expiry = offender.last + max(backoff.quiet, backoff.window) - now
  call('SET', offender.key, stored, 'PX', milliseconds(expiry))
end

local function load(key, backoff)
  local offender = { key = key, count = 0, last = 0, alerted = 0, newest = {} }
  local stored = pcall('GET', key)
  if not stored then
    return offender
  end
  local size = type(stored) == 'string' and #stored or 0
  if size < 24 or size % 8 ~= 0 then
    return nil
  end
  offender.count, offender.alerted = unpacked('<dd', stored)
  local newest = offender.newest
  for at = 17, size, 8 do
    newest[#newest + 1] = unpacked('<d', stored, at)
    if not are_whole(offender.count, newest[#newest]) then
      return nil
    end
  end
  offender.last = newest[#newest]
  local ahead = offender.last - now
  if ahead >= patience then
    for i, moment in ipairs(newest) do
      newest[i] = moment - ahead
    end
    offender.alerted = max(offender.alerted - ahead, 0)
    offender.last, stepped = now, 1
    save(offender, backoff)
  end
  return offender
end

local function count_of(offender, backoff, moment)
  return moment - offender.last < backoff.quiet and offender.count or 0
end

-- Whether an agent came back before an enforced wait was over.
local function blocks(offender, backoff)
  local count = count_of(offender, backoff, now)
  return backoff.enforce and count > 0 and offender.last + backoff.steps[min(count, #backoff.steps)] > now
end

-- Count some violations, and return whether one of them raises an alert.
local function record(offender, backoff, times)
  local alert, newest = 0, offender.newest
  local moment = offender.count > 0 and max(now, offender.last) or now
  for _ = 1, times do
    offender.count, offender.last = count_of(offender, backoff, moment) + 1, moment
    newest[#newest + 1] = moment
    local oldest = newest[#newest - backoff.after + 1]
    if oldest and moment - oldest < backoff.window
      and (offender.alerted == 0 or moment - offender.alerted >= backoff.window) then
      offender.alerted, alert = moment, 1
    end
  end
  save(offender, backoff)
  return alert
end

-- How many in a row, when the last was, and whether an alert is raised.
local function report(offender, alert)
  push(offender.count)
  push(offender.last)
  push(alert)
end

local function forget(offender, backoff)
  call('DEL', offender.key)
  return offender.count > 0 and now - offender.last < max(backoff.quiet, backoff.window)
end

return { read = read, load = load, blocks = blocks, record = record, report = report, forget = forget }
