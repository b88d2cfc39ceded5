-- Holds and settlements whose limits are simple ones: buckets at a tick of a microsecond, budgets, slots, meters, and what
-- is unlimited or blocked. Nearly all are. This is the work of holds.lua and of the limits' parts without their tables
-- and functions. Whatever isn't simple is left to them before anything is written: costs that come back, windows, tokens
-- drawn ahead, leases that have ended, records of another form, ids that are known.

local byte, sub, rep, fmod = string.byte, string.sub, string.rep, math.fmod
local BUCKET, BUDGET, METER, SLOTS = 98, 99, 109, 115 -- letters
local MOST, GROWN = 16, 24 -- entries of a bucket's headrooms: see headroom.lua
local METERED = 34560000000000 -- microseconds for which a day of a meter is kept
local specs = {} -- that were read, by their text

local function read(text)
  local kinds, places, ones, gains, fulls = {}, {}, {}, {}, {}
  local count, asks, marks, at = 0, 0, 0, 2
  while at <= #text do
    local letter = byte(text, at)
    at = at + 1
    if letter == 97 then -- an ask begins
      asks = asks + 1
    else
      count = count + 1
      kinds[count], places[count] = letter, asks
      if letter == BUCKET then
        local tick, _
        _, ones[count], gains[count], tick, fulls[count] = unpacked('<ddddd', text, at)
        if tick ~= 1 then
          return false
        end
        marks, at = marks + 1, at + 40
      elseif letter == BUDGET then
        ones[count], gains[count] = unpacked('<dd', text, at)
        marks, at = marks + 1, at + 16
      elseif letter == METER then
        gains[count], marks = 1, marks + 1
      elseif letter == SLOTS or letter == 102 then
        ones[count], at = unpacked('<d', text, at), at + 8
      else
        return false
      end
    end
  end
  return {
    count = count, asks = asks, marks = marks, kinds = kinds, places = places, ones = ones, gains = gains, fulls = fulls,
    costs = '<' .. rep('d', asks), head = '<BBBdd' .. rep('I4', asks) .. 'Bc0I2c0',
    record = '<' .. rep('I4', asks) .. 'Bc0I2c0I4' .. rep('d', marks),
  }
end

-- Find the current periods, and the fields of meters. Return where the texts begin; nil if the moment is in another one.
local function find_periods(spec, numbers, starts, lasts, aheads, fields)
  local kinds, gains, at, meters = spec.kinds, spec.gains, 57 + 8 * spec.asks, false
  for i = 1, spec.count do
    local kind = kinds[i]
    if (kind == BUDGET or kind == METER) and gains[i] == 1 then
      local ahead, _, start, finish, after = unpacked('<ddddd', numbers, at)
      if now + ahead < start or now + ahead >= finish then
        return nil
      end
      starts[i], lasts[i], aheads[i], at = start, after - now - ahead, ahead, at + 40
      fields[i] = finish
      meters = meters or kind == METER
    end
  end
  if meters then
    for i = 1, spec.count do
      if kinds[i] == METER then
        fields[i], at = unpacked('<I2c0', numbers, at)
      end
    end
  end
  return at
end

-- The rows of a bucket's headrooms as a list: three numbers for the head, and for each entry; nil if there are others.
local function rows_of(stored)
  local rows = { unpacked('<' .. rep('d', (#stored - 16) / 8), stored, 17) }
  rows[#rows] = nil
  for i = 1, #rows, 3 do
    if not (rows[i] < 0 and rows[i] >= -LARGEST and rows[i + 1] >= 0 and rows[i + 2] >= 0) then
      return nil
    end
  end
  return rows
end

-- Remove an entry: its holds belong to the one before it, if there is any.
local function remove(rows, at)
  local count = #rows
  if at > 4 then
    rows[at - 1] = rows[at - 1] + rows[at + 2]
  end
  for i = at, count - 3 do
    rows[i] = rows[i + 3]
  end
  rows[count], rows[count - 1], rows[count - 2] = nil, nil, nil
end

local function see(rows, room)
  local last = #rows - 2
  if last < 4 or rows[last + 1] <= room then
    return
  end
  while last > 4 and rows[last - 2] > room do
    remove(rows, last)
    last = last - 3
  end
  if room == 0 or last > 4 and rows[last - 2] == room then
    remove(rows, last)
  else
    rows[last + 1] = room
  end
end

-- The place of the entry that a hold belongs to; 1 if it has none any more.
local function place_of(rows, serial)
  if serial <= rows[3] or serial > -rows[1] then
    return 1
  end
  local at = #rows - 2
  while at > 1 and -rows[at] > serial do
    at = at - 3
  end
  return at
end

-- Give a cost back to a hold, or less, and return how many units.
local function give_back(rows, room, cost, unit, serial)
  see(rows, room)
  local place = place_of(rows, serial)
  local least = place > 1 and rows[place + 1] or 0
  local given = cost > (least - fmod(least, unit)) / unit and least or cost * unit
  if given <= 0 then
    return 0
  end
  local left = least - given
  for i = 4, #rows, 3 do
    rows[i + 1] = i > place and rows[i + 1] - given or min(rows[i + 1], left)
  end
  for i = #rows - 2, 4, -3 do
    if rows[i + 1] == 0 or i > 4 and rows[i + 1] == rows[i - 2] then
      remove(rows, i)
    end
  end
  return given
end

local function leave(rows, serial)
  local place = place_of(rows, serial)
  if place == 1 then
    return false
  end
  rows[place + 2] = rows[place + 2] - 1
  if rows[place + 2] <= 0 then
    remove(rows, place)
  end
  return true
end

local function count_metered(key, field, start, ahead, cost)
  if cost == 0 or start <= now + ahead - METERED then
    return
  end
  local day = string.format('%.0f', start)
  local name = key .. day
  local used = pcall('HINCRBY', name, field, string.format('%.0f', cost))
  if type(used) == 'table' then
    return
  elseif used == cost then
    local place = string.find(key, '}', 1, true)
    local zone, meter = string.match(key, '^m1:([^:]*:)(.*):$', place + 1)
    local days, expiry = sub(key, 1, place) .. 'u1:' .. meter, milliseconds(start + METERED - now - ahead)
    call('PEXPIRE', name, expiry)
    if type(pcall('ZADD', days, start, zone .. day)) ~= 'table' then
      call('ZREMRANGEBYSCORE', days, '-inf', string.format('%.0f', now + ahead - METERED))
      call('PEXPIRE', days, expiry)
    end
  end
  if used <= 0 then
    call('HDEL', name, field)
  end
end

local function keep_set(name, expiry, new)
  if new or call('PTTL', name) < expiry then
    call('PEXPIRE', name, expiry + min(expiry, 60000))
  end
end

-- Load the states of limits into lists: levels (or what is used), and their starts. Return the string of a hold, or false,
-- and the strings of the limits by their places; nil if something isn't simple.
local function load(spec, next_key, starts, periods, finishes, levels, keys)
  local kinds, gains, fulls, names, key = spec.kinds, spec.gains, spec.fulls, {}, next_key
  local many = 0
  for i = 1, spec.count do
    local kind = kinds[i]
    if kind ~= 102 then
      keys[i], key = KEYS[key], key + 1
      if kind == BUCKET or kind == BUDGET then
        many = many + 1
        names[many] = keys[i]
      end
    end
  end
  names[many + 1] = KEYS[key + 1]
  local found, missing = call('MGET', unpack(names)), nil
  many = 0
  for i = 1, spec.count do
    local kind = kinds[i]
    if kind == BUCKET then
      many = many + 1
      local stored = found[many]
      if stored then
        local size = #stored
        if size % 24 ~= 16 then
          return nil
        end
        local level, stamp = unpacked('<dd', stored)
        local gained, full = (now - stamp) * gains[i], fulls[i]
        if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST then
          return nil
        elseif size > 16 and (unpacked('<d', stored, 17) >= 0 or unpacked('<d', stored, size - 23) >= 0) then
          return nil -- tokens drawn ahead, or what comes back
        end
        levels[i] = min(level + gained, full)
      else
        levels[i], missing = fulls[i], true
      end
      starts[i] = now
    elseif kind == BUDGET then
      many = many + 1
      local stored, start, used = found[many], 0, 0
      if stored then
        if #stored ~= 16 then
          return nil
        end
        start, used = unpacked('<dd', stored)
        if not are_whole(start, used) then
          return nil
        end
      else
        missing = true
      end
      if gains[i] == 1 then
        if start < periods[i] then
          start, used = periods[i], 0
        elseif start > finishes[i] then
          return nil
        end
      end
      starts[i], levels[i] = start, used
    elseif kind == SLOTS then
      local used = pcall('ZCOUNT', keys[i], string.format('(%.0f', now), '+inf')
      if type(used) == 'table' then
        return nil
      end
      levels[i] = used
    end
  end
  if missing then -- or not a string
    local absent = {}
    for i = 1, many do
      if not found[i] then
        absent[#absent + 1] = names[i]
      end
    end
    if call('EXISTS', unpack(absent)) > 0 then
      return nil
    end
  end
  return found[many + 1], found, key
end

local function put(status, state, left, costs, asks)
  answer[length + 1], answer[length + 2], answer[length + 3], answer[length + 4] = status, state, left, asks
  length = length + 4
  for i = 1, asks do
    answer[length + i] = costs[i]
  end
  length = length + asks
end

local function report(spec, levels, starts, keys, cost)
  local kinds = spec.kinds
  for i = 1, spec.count do
    local kind = kinds[i]
    if kind == BUCKET then
      answer[length + 1], answer[length + 2] = levels[i], now
      length = length + 2
    elseif kind == BUDGET then
      answer[length + 1], answer[length + 2] = starts[i], levels[i]
      length = length + 2
    elseif kind == SLOTS then
      local used, first, last = levels[i], 0, 0
      if used > 0 then
        last = tonumber(call('ZREVRANGE', keys[i], 0, 0, 'WITHSCORES')[2])
        if cost > 0 and used >= spec.ones[i] then
          local now_on = string.format('(%.0f', now)
          local ends = call('ZRANGEBYSCORE', keys[i], now_on, '+inf', 'WITHSCORES', 'LIMIT', used - spec.ones[i], 1)
          first = tonumber(ends[2])
        end
      end
      answer[length + 1], answer[length + 2], answer[length + 3] = used, first, last
      length = length + 3
    end
  end
end

local function member_of(name, key)
  local place = string.find(name, '}', 1, true)
  return sub(key, 1, place) == sub(name, 1, place) and sub(name, place + 4) or name
end

-- A new hold. Return the number of keys; nil if it isn't simple.
local function hold(text, numbers, next_key)
  local spec = specs[text]
  if spec == nil then
    spec = read(text)
    specs[text] = spec
  end
  if not spec then
    return nil
  end
  local _, flag, lease, keep, release, base, checksum = unpacked('<ddddddd', numbers)
  if release ~= 0 or flag == 1 then
    return nil
  end
  local count, asks, kinds, places, ones = spec.count, spec.asks, spec.kinds, spec.places, spec.ones
  local costs, periods, lasts, aheads, fields = { unpacked(spec.costs, numbers, 57) }, {}, {}, {}, {}
  local texts = find_periods(spec, numbers, periods, lasts, aheads, fields)
  if not texts then
    return nil
  end
  local starts, levels, keys = {}, {}, {}
  local known, found, key = load(spec, next_key, starts, periods, fields, levels, keys)
  if known ~= false then
    return nil
  end
  local index, name = KEYS[key], KEYS[key + 1]
  local id, most, note, digest, shape = unpacked('<I2c0dI2c0Bc0I4c0', numbers, texts)
  local card = pcall('ZCARD', index)
  if type(card) == 'table' or card >= most then
    return nil
  end

  -- Whether all of them pass.
  local args, at = { 1, flag == 2 and 8 or 0, asks, now + lease, keep }, 5
  for i = 1, asks do
    local cost = costs[i]
    if cost >= 4294967296 then
      return nil
    end
    args[at + i] = cost
  end
  at = at + asks
  args[at + 1], args[at + 2], args[at + 3], args[at + 4], args[at + 5] = #digest, digest, #note, note, checksum
  at = at + 5
  local passes, slots = true, false
  for i = 1, count do
    local kind, cost = kinds[i], costs[places[i]]
    local least = cost > 1 and cost or 1
    if kind == BUCKET then
      passes = passes and least * ones[i] <= levels[i]
    elseif kind == BUDGET then
      passes = passes and least <= ones[i] - levels[i]
    elseif kind == SLOTS then
      passes, slots = passes and levels[i] < ones[i], true
    elseif kind ~= METER then
      passes = passes and ones[i] > 0
    end
  end
  if not passes then
    if slots or flag == 2 then
      return nil
    end
    put(0, 0, 0, costs, asks)
    report(spec, levels, starts, keys, 1)
    return key + 2 - next_key
  end

  -- What they will be, and where the hold is counted.
  local many, stored = 0, {}
  for i = 1, count do
    local kind, cost = kinds[i], costs[places[i]]
    if kind == BUCKET then
      many, at = many + 1, at + 1
      local before, level = found[many], levels[i]
      if cost == 0 then
        args[at] = -1
      else
        local room, rest = spec.fulls[i] - level, ''
        level = level - cost * ones[i]
        local left = spec.fulls[i] - level
        local size = before and #before or 16
        local last, lowest = base, 0
        if size > 16 then
          last, _, lowest = unpacked('<ddd', before, 17)
          last = -last
          if size > 40 and room > 0 and unpacked('<d', before, size - 15) <= room and size < 40 + 24 * GROWN then
            rest = sub(before, 41)
          else
            local rows = rows_of(before)
            if not rows or left > LARGEST or #rows >= 3 + 3 * GROWN then
              return nil
            end
            see(rows, room)
            if #rows > 3 then
              rest = packed('<' .. rep('d', #rows - 3), unpack(rows, 4))
            else
              last, lowest = base, base
            end
          end
        else
          lowest = base
        end
        if left > LARGEST then
          return nil
        end
        stored[i] = packed('<ddddd', level, now, -last - 1, 0, lowest) .. rest .. packed('<ddd', -last - 1, left, 1)
        args[at] = last + 1
      end
      levels[i] = level
    elseif kind == BUDGET then
      many, at = many + 1, at + 1
      args[at] = starts[i]
      if cost > 0 then
        levels[i] = levels[i] + cost
        stored[i] = packed('<dd', starts[i], levels[i])
      end
    elseif kind == METER then
      at = at + 1
      args[at] = periods[i]
    end
  end
  local finish, forgotten = now + lease, milliseconds(lease + keep)
  if not call('SET', name, packed(spec.head .. sub(spec.record, 2 * asks + 9), unpack(args)), 'PX', forgotten, 'NX') then
    return nil
  end

  -- Write them.
  call('ZADD', index, finish, id)
  keep_set(index, forgotten, card == 0)
  for i = 1, count do
    local kind = kinds[i]
    if stored[i] then
      local expiry
      if kind == BUCKET then
        expiry = milliseconds((spec.fulls[i] - levels[i]) / spec.gains[i])
      else
        expiry = milliseconds(spec.gains[i] == 1 and lasts[i] + 86400000000 or 31536000000000)
      end
      call('SET', keys[i], stored[i], 'PX', expiry)
    elseif kind == METER then
      count_metered(keys[i], fields[i], periods[i], aheads[i], costs[places[i]])
    elseif kind == SLOTS then
      local used = levels[i] + 1
      levels[i] = used
      if keys[i] ~= index then
        call('ZADD', keys[i], finish, member_of(name, keys[i]))
        keep_set(keys[i], forgotten, used == 1)
        if now % 4 == 0 then
          local ended = call('ZCARD', keys[i]) - used
          if ended > 0 then
            call('ZREMRANGEBYRANK', keys[i], 0, min(ended, 60) - 1)
          end
        end
      end
    end
  end
  if shape ~= '' then
    call('SET', sub(name, 1, (string.find(name, '}', 1, true))) .. 'p1:' .. digest, shape, 'PX', 1382400000)
  end
  if card > 64 and now % 4 == 0 then
    local ended = call('ZRANGEBYSCORE', index, '-inf', string.format('%.0f', now - keep), 'LIMIT', 0, 60)
    local prefix, gone = sub(name, 1, #name - #id), {}
    for i = 1, #ended do
      if call('EXISTS', prefix .. ended[i]) == 0 then
        gone[#gone + 1] = ended[i]
      end
    end
    if #gone > 0 then
      call('ZREM', index, unpack(gone))
    end
  end
  put(1, 1, lease, costs, asks)
  report(spec, levels, starts, keys, 0)
  return key + 2 - next_key
end

-- The end of a hold that is open. Return the number of keys; nil if it isn't simple.
local function settle(text, numbers, next_key)
  local spec = specs[text]
  if spec == nil then
    spec = read(text)
    specs[text] = spec
  end
  if not spec then
    return nil
  end
  local count, asks, kinds, places, ones = spec.count, spec.asks, spec.kinds, spec.places, spec.ones
  local given, flag, _, _, _, _, checksum = unpacked('<ddddddd', numbers)
  local periods, lasts, aheads, fields = {}, {}, {}, {}
  local texts = find_periods(spec, numbers, periods, lasts, aheads, fields)
  if not texts then
    return nil
  end
  local starts, levels, keys = {}, {}, {}
  local record, found, key = load(spec, next_key, starts, periods, fields, levels, keys)
  if not record or #record < 26 + 4 * asks then
    return nil
  end
  local state, flags, held_asks, finish, keep = unpacked('<BBBdd', record)
  if state ~= 1 or flags % 8 ~= 0 or held_asks ~= asks or not (finish > now and finish <= LARGEST) then
    return nil
  end
  local digest_size = byte(record, 20 + 4 * asks)
  local low, high = byte(record, 21 + 4 * asks + digest_size, 22 + 4 * asks + digest_size)
  if not high or #record ~= 26 + 4 * asks + digest_size + low + 256 * high + 8 * spec.marks then
    return nil
  end
  local held = { unpacked(spec.record, record, 20) }
  if held[asks + 3] ~= checksum then
    return nil
  end
  local actual, args = held, { flag == 1 and 3 or 2, flags, asks, now, keep }
  if given == 1 then
    actual = { unpacked(spec.costs, numbers, 57) }
  end
  for i = 1, asks do
    if actual[i] >= 4294967296 then
      return nil
    end
    args[5 + i] = actual[i]
  end
  args[asks + 6], args[asks + 7] = digest_size, held[asks + 1]
  args[asks + 8], args[asks + 9] = #held[asks + 2], held[asks + 2]

  -- What the limits will be.
  local many, mark, stored = 0, asks + 3, {}
  for i = 1, count do
    local kind, place = kinds[i], places[i]
    local change = actual[place] - held[place]
    if kind == BUCKET then
      many, mark = many + 1, mark + 1
      local before, level, full, serial = found[many], levels[i], spec.fulls[i], held[mark]
      local size, rest = before and #before or 16, ''
      if size > 16 and serial ~= -1 or size > 16 and change > 0 then
        local rows = rows_of(before)
        if not rows then
          return nil
        end
        local changed = change ~= 0
        if change > 0 then
          see(rows, min(full - level, LARGEST))
          level = level - change * ones[i]
        elseif change < 0 then
          level = level + give_back(rows, min(full - level, LARGEST), -change, ones[i], serial)
        end
        changed = leave(rows, serial) or changed
        if changed then
          if #rows > 3 and level < full then
            rest = packed('<' .. rep('d', #rows), unpack(rows))
          end
          stored[i] = packed('<dd', level, now) .. rest
        end
      elseif change > 0 then
        level = level - change * ones[i]
        stored[i] = packed('<dd', level, now)
        if size > 16 then
          return nil
        end
      end
      if level < -LARGEST or level > full then
        return nil
      end
      levels[i] = level
    elseif kind == BUDGET then
      many, mark = many + 1, mark + 1
      if change ~= 0 and starts[i] == held[mark] then
        levels[i] = max(levels[i] + change, 0)
        if levels[i] > LARGEST then
          return nil
        end
        stored[i] = packed('<dd', starts[i], levels[i])
      end
    elseif kind == METER then
      mark = mark + 1
    end
  end
  local index, name = KEYS[key], KEYS[key + 1]
  local id = unpacked('<I2c0', numbers, texts)
  local listed = pcall('ZREM', index, id)
  if listed ~= 1 then
    return nil
  end

  -- Write them.
  mark = asks + 3
  for i = 1, count do
    local kind = kinds[i]
    if kind == BUCKET then
      mark = mark + 1
      if stored[i] then
        if levels[i] < spec.fulls[i] then
          call('SET', keys[i], stored[i], 'PX', milliseconds((spec.fulls[i] - levels[i]) / spec.gains[i]))
        else
          call('DEL', keys[i])
        end
      end
    elseif kind == BUDGET then
      mark = mark + 1
      if stored[i] then
        if levels[i] > 0 then
          local expiry = spec.gains[i] == 1 and lasts[i] + 86400000000 or 31536000000000
          call('SET', keys[i], stored[i], 'PX', milliseconds(expiry))
        else
          call('DEL', keys[i])
        end
      end
    elseif kind == METER then
      mark = mark + 1
      count_metered(keys[i], fields[i], held[mark], aheads[i], actual[places[i]] - held[places[i]])
    elseif kind == SLOTS then
      levels[i] = levels[i] - 1
      if keys[i] ~= index then
        call('ZREM', keys[i], member_of(name, keys[i]))
      end
    end
  end
  call('SET', name, packed(spec.head, unpack(args)), 'PX', milliseconds(keep))
  put(6, args[1], 0, actual, asks)
  report(spec, levels, starts, keys, 1)
  return key + 2 - next_key
end

return { h = hold, t = settle }
