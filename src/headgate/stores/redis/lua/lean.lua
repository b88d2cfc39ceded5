-- Holds and settlements whose limits are simple ones: buckets at a tick of a microsecond, budgets, slots, meters, and what
-- is unlimited or blocked. Nearly all are. This is the work of holds.lua and of the limits' parts, in a form that needs few
-- tables and functions: each of those takes time. Where something else isn't simple (an id that is known, a lease that has
-- ended, a record of another form, tokens drawn ahead, costs that come back, a period that is over, a shape that the server
-- has lost), nothing is written, and the answer is -4: ask again in the other form.
--
-- A spec: 'H' or 'T', and a letter for the kind of each limit. The numbers: for each limit five (which ask it belongs to,
-- and four that depend on the kind, see below); nine (whether costs are given; whether it is a cancel, or is granted
-- whatever is left (2); the lease; for how long it is remembered; a random number; the checksum of its limits; what to add
-- to the time to get that of day; how many may be open; and the number of asks); the cost of each limit; and the id, what
-- follows the head in the record (without where it was counted), the digest of the shape, and the shape if it is to be
-- stored, and the fields of meters. The answer is the status (HELD, DENIED or AS_NOW, of holds.lua, and 10); after AS_NOW
-- the costs, if none are given; and the reports.
--
-- The four numbers of a bucket: its unit, gain, and capacity in units; of a budget: its amount, and the start and end of
-- the current period and the end of the next one (0 without periods); of a meter the same, and its key is that of the
-- current day; of slots their count.

local variant = ...

if variant == 1 then

  -- One bucket alone.
  return function(verb, numbers, next_key)
    local _, unit, gain, full, _, given, flag, lease, keep, base, checksum, _, most, _, cost, id, middle, digest, shape =
      unpacked('<dddddddddddddddI2c0I2c0Bc0I4c0', numbers)
    local key, index, name = KEYS[next_key], KEYS[next_key + 1], KEYS[next_key + 2]
    local found = call('MGET', key, name)
    local stored, record, level, size = found[1], found[2], full, 16
    if stored then
      size = #stored
      if size % 24 ~= 16 then
        return false
      end
      local stamp
      level, stamp = unpacked('<dd', stored)
      local gained = (now - stamp) * gain
      if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST
        or size > 16 and (unpacked('<d', stored, 17) >= 0 or unpacked('<d', stored, size - 23) >= 0) then
        return false -- it has tokens drawn ahead, or costs that come back
      end
      level = min(level + gained, full)
    elseif (verb ~= 'H' or cost == 0 or cost * unit > full) and call('EXISTS', key) > 0 then
      return false -- it isn't a string; another hold finds that out when it writes
    end
    if verb == 'H' then
      local card, left, absent = pcall('ZCARD', index), level - cost * unit, not stored and cost > 0
      if record or type(card) == 'table' or card >= most or digest ~= '' and shape == '' then
        return false
      elseif left < 0 or cost == 0 and level < unit then
        if flag == 2 then
          return false
        end
        answer[length + 1], answer[length + 2], answer[length + 3] = 10, level, now
        length = length + 3
        return true
      end
      local last = -1
      if cost == 0 then
        stored = nil
      elseif size == 16 then
        last = base + 1
        stored = packed('<dddddddd', left, now, -last, 0, base, -last, full - left, 1)
      else
        others = others or { lean(3) }
        stored, last = others[1](stored, full - level, left, full - left, base)
        if not stored then
          return false
        end
      end
      local finish, forgotten, expiry = now + lease, milliseconds(lease + keep), milliseconds((full - left) / gain)
      record = packed('<BBBdd', 1, flag == 2 and 8 or 0, 1, finish, keep) .. middle .. packed('<d', last)
      if full - left > LARGEST or absent and not call('SET', key, stored, 'PX', expiry, 'NX') then
        return false
      elseif not call('SET', name, record, 'PX', forgotten, 'NX') then
        if absent then
          call('DEL', key)
        end
        return false
      end
      call('ZADD', index, finish, id)
      if card == 0 or call('PTTL', index) < forgotten then
        call('PEXPIRE', index, forgotten + min(forgotten, 60000))
      end
      if stored and not absent then
        call('SET', key, stored, 'PX', expiry)
      end
      if shape ~= '' or card > 64 and now % 4 == 0 then
        others = others or { lean(3) }
        others[3](index, name, id, keep, digest, shape)
      end
      answer[length + 1], answer[length + 2], answer[length + 3] = 11, left, now
      length = length + 3
      return true
    end
    if not record or #record < 38 then
      return false
    end
    local state, flags, asks, finish, held_keep, held, digest_size = unpacked('<BBBddI4B', record)
    local low, high = string.byte(record, 25 + digest_size, 26 + digest_size)
    if state ~= 1 or flags % 8 ~= 0 or asks ~= 1 or not high or #record ~= 38 + digest_size + low + 256 * high
      or not (finish > now and finish <= LARGEST) then
      return false
    end
    local limits, serial = unpacked('<I4d', record, #record - 11)
    local actual, changed = given == 1 and cost or held, false
    if limits ~= checksum then
      return false
    elseif size > 16 then
      local change, head, _, lowest = actual - held, unpacked('<ddd', stored, 17)
      local entry, room, holds = unpacked('<ddd', stored, size - 23)
      room = min(room, full - level)
      -- It is easy if the hold has the last of the headrooms for itself, and what it gives back leaves the others alone.
      local back = -change * unit
      if -change > (room - math.fmod(room, unit)) / unit then
        back = room
      end
      if holds == 1 and entry == -serial and serial > lowest and serial <= -head and change <= 0
        and (size == 64 or size > 64 and unpacked('<d', stored, size - 39) <= room - back) then
        level = level + back
        changed = packed('<dd', level, now)
        if size > 64 then
          changed = changed .. string.sub(stored, 17, size - 24)
        end
      else
        others = others or { lean(3) }
        level, changed = others[2](stored, level, full, unit, change, serial)
        if not level then
          return false
        end
      end
    elseif actual > held then
      level = level - (actual - held) * unit
      changed = packed('<dd', level, now)
    end
    if level < -LARGEST or level > full or pcall('ZREM', index, id) ~= 1 then
      return false
    end
    if changed and level < full then
      call('SET', key, changed, 'PX', milliseconds((full - level) / gain))
    elseif changed then
      call('DEL', key)
    end
    state = flag == 1 and 3 or 2
    record = packed('<BBBddI4', state, flags, 1, now, held_keep, actual) .. string.sub(record, 24, #record - 12)
    call('SET', name, record, 'PX', milliseconds(held_keep))
    answer[length + 1] = 16
    length = length + 1
    if given == 0 then
      length = length + 1
      answer[length] = actual
    end
    answer[length + 1], answer[length + 2] = level, now
    length = length + 2
    return true
  end

elseif variant == 2 then

  -- Any limits. Requests of one batch often have the same ones: those are read once.
  local kinds_of, limits_of = {}, {}

  -- Of each limit: what is left of a bucket, or used of another; its start; what is to be stored, if anything; and by how
  -- much its cost changes. And where those were counted that tell it in the record.
  local levels, starts = { 0, 0, 0, 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0, 0, 0, 0 }
  local writes, changes = { 0, 0, 0, 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0, 0, 0, 0 }
  local marks = { 0, 0, 0, 0, 0, 0, 0, 0 }

  -- Of the list of holds that the request just before this one was about: how many are in it, the milliseconds for which
  -- it is kept at least, and the digest of a shape that is stored. Requests of one batch often have the same list.
  local last_place, last_index, last_card, last_kept, last_digest = 0, nil, nil, nil, nil

  -- The kinds of the limits; the number of the keys, and of those of meters at their beginning, which needn't be read; and
  -- the formats of the costs and texts, and of where all is counted.
  local function read_kinds(text)
    local kinds = { string.byte(text, 2, #text) }
    local width, counted, unread = 2, 0, 0
    for i = 1, #kinds do
      local kind = kinds[i]
      unread = unread + (kind == 109 and unread == width - 2 and 1 or 0)
      width = width + (kind == 102 and 0 or 1)
      counted = counted + ((kind == 98 or kind == 99 or kind == 109) and 1 or 0)
    end
    kinds.width, kinds.unread, kinds.rest = width, unread, '<' .. string.rep('d', #kinds) .. 'I2c0I2c0Bc0I4c0'
    kinds.marks = '<' .. string.rep('d', counted)
    kinds_of[text] = kinds
    return kinds
  end

  -- Return the number of the keys, or false.
  return function(verb, text, numbers, next_key, position)
    local kinds = kinds_of[text] or read_kinds(text)
    local count, width, unread = #kinds, kinds.width, kinds.unread
    local block = string.sub(numbers, 1, 40 * count)
    local limits = limits_of[block]
    if not limits then
      limits = { unpacked('<' .. string.rep('d', 5 * count), block) }
      limits_of[block] = limits
    end
    local given, flag, lease, keep, base, checksum, ahead, most, asks = unpacked('<ddddddddd', numbers, 40 * count + 1)
    local rest = { unpacked(kinds.rest, numbers, 40 * count + 73) }
    local id, texts = rest[count + 1], rest[count + 5] -- before these the costs
    local found = call('MGET', unpack(KEYS, next_key + unread, next_key + width - 1))
    local index, name, record = KEYS[next_key + width - 2], KEYS[next_key + width - 1], found[width - unread]
    local is_hold, moment, place, absent = verb == 'H', now + ahead, 0, nil
    if is_hold == (record and true or false) then
      return false
    elseif index ~= last_index or position ~= last_place + 2 then
      last_index = nil
    end

    local passes = true
    for i = 1, count do
      local kind, at = kinds[i], 5 * i - 3
      local least = rest[i]
      least = least > 1 and least or 1
      writes[i] = false
      if kind == 98 then
        place = place + 1
        local stored, level, full = found[place - unread], limits[at + 2], limits[at + 2]
        if stored then
          local stamp
          local long = #stored
          if long % 24 ~= 16 then
            return false
          end
          level, stamp = unpacked('<dd', stored)
          local gained = (now - stamp) * limits[at + 1]
          if not are_whole(level, stamp) or level > full or gained < 0 or gained > LARGEST
            or long > 16 and (unpacked('<d', stored, 17) >= 0 or unpacked('<d', stored, long - 23) >= 0) then
            return false
          end
          level = min(level + gained, full)
        else
          absent = absent or {}
          absent[#absent + 1] = KEYS[next_key + place - 1]
        end
        levels[i] = level
        passes = passes and least * limits[at] <= level
      elseif kind == 99 then
        place = place + 1
        local stored, start, used, first = found[place - unread], 0, 0, limits[at + 1]
        if stored then
          if #stored ~= 16 then
            return false
          end
          start, used = unpacked('<dd', stored)
          if not are_whole(start, used) then
            return false
          end
        else
          absent = absent or {}
          absent[#absent + 1] = KEYS[next_key + place - 1]
        end
        if first > 0 or limits[at + 2] > 0 then
          if moment < first or moment >= limits[at + 2] or start > limits[at + 2] then
            return false
          elseif start < first then
            start, used = first, 0
          end
        end
        levels[i], starts[i] = used, start
        passes = passes and least <= limits[at] - used
      elseif kind == 109 then
        place = place + 1
        if moment < limits[at + 1] or moment >= limits[at + 2] then
          return false
        end
      elseif kind == 115 then
        place = place + 1
        local used = pcall('ZCOUNT', KEYS[next_key + place - 1], string.format('(%.0f', now), '+inf')
        if type(used) == 'table' then
          return false
        end
        levels[i] = used
        passes = passes and used < limits[at]
      else
        passes = passes and limits[at] > 0
      end
    end
    if absent and call('EXISTS', unpack(absent)) > 0 then -- not a string
      return false
    end

    -- What becomes of them.
    local status, card, held = 11, nil, nil
    place = 0
    if is_hold then
      card = last_index and last_card or pcall('ZCARD', index)
      if type(card) == 'table' or card >= most then
        return false
      elseif not passes then
        if flag == 2 then
          return false
        end
        status = 10
      else
        local last = 0
        for i = 1, count do
          local kind, at = kinds[i], 5 * i - 3
          local cost = rest[i]
          place = place + (kind == 102 and 0 or 1)
          changes[i] = cost
          if kind == 98 then
            local mark = -1
            if cost > 0 then
              local stored, level, full = found[place - unread], levels[i], limits[at + 2]
              local left = level - cost * limits[at]
              if full - left > LARGEST then
                return false
              elseif not stored or #stored == 16 then
                mark = base + 1
                stored = packed('<dddddddd', left, now, -mark, 0, base, -mark, full - left, 1)
              else
                others = others or { lean(3) }
                stored, mark = others[1](stored, full - level, left, full - left, base)
                if not stored then
                  return false
                end
              end
              levels[i], writes[i] = left, stored
            end
            last = last + 1
            marks[last] = mark
          elseif kind == 99 then
            if cost > 0 then
              levels[i], writes[i] = levels[i] + cost, true
            end
            last = last + 1
            marks[last] = starts[i]
          elseif kind == 109 then
            starts[i] = limits[at + 1]
            last = last + 1
            marks[last] = starts[i]
          elseif kind == 115 then
            levels[i] = levels[i] + 1
          end
        end
        local digest, shape = rest[count + 3], rest[count + 4]
        if digest ~= '' and shape == '' and not (last_index and digest == last_digest)
          and call('EXISTS', string.sub(name, 1, (string.find(name, '}', 1, true))) .. 'p1:' .. digest) == 0 then
          return false
        end
        local forgotten = milliseconds(lease + keep)
        record = packed('<BBBdd', 1, flag == 2 and 8 or 0, asks, now + lease, keep) .. rest[count + 2]
          .. packed(kinds.marks, unpack(marks, 1, last))
        if not call('SET', name, record, 'PX', forgotten, 'NX') then
          return false
        end
        call('ZADD', index, now + lease, id)
        local kept = card > 0 and last_index and last_kept or 0
        if kept < forgotten then
          kept = card > 0 and call('PTTL', index) or 0
          if kept < forgotten then
            kept = forgotten + min(forgotten, 60000)
            call('PEXPIRE', index, kept)
          end
        end
        last_place, last_index, last_card, last_kept, last_digest = position, index, card + 1, kept, digest
        if shape ~= '' or card > 64 and now % 4 == 0 then
          others = others or { lean(3) }
          others[3](index, name, id, keep, digest, shape)
          last_index = nil
        end
      end
    else
      status = 16
      local head, long = 19 + 4 * asks, #record
      if long < head + 7 then
        return false
      end
      local state, flags, held_asks, finish, held_keep = unpacked('<BBBdd', record)
      local digest_size = string.byte(record, head + 1)
      local low, high = string.byte(record, head + 2 + digest_size, head + 3 + digest_size)
      if state ~= 1 or flags % 8 ~= 0 or held_asks ~= asks or not (finish > now and finish <= LARGEST) or not high then
        return false
      end
      local mark = head + 4 + digest_size + low + 256 * high
      if mark + 3 > long or unpacked('<I4', record, mark) ~= checksum then
        return false
      end
      held = { unpacked('<' .. string.rep('I4', asks), record, 20) }
      local costs = string.sub(record, 20, head)
      if given == 1 then
        costs = string.sub(rest[count + 2], 1, 4 * asks)
      end
      local settled = packed('<BBBdd', flag == 1 and 3 or 2, flags, asks, now, held_keep) .. costs
        .. string.sub(record, head + 1, mark - 1)
      mark = mark + 4
      for i = 1, count do
        local kind, at = kinds[i], 5 * i - 3
        local change = given == 1 and rest[i] - held[limits[at - 1]] or 0
        place = place + (kind == 102 and 0 or 1)
        changes[i] = change
        if kind == 98 or kind == 99 or kind == 109 then
          if mark + 7 > long then
            return false
          end
          local counted = unpacked('<d', record, mark)
          mark = mark + 8
          if kind == 98 then
            local stored, level, full, unit = found[place - unread], levels[i], limits[at + 2], limits[at]
            if stored and #stored > 16 then
              others = others or { lean(3) }
              level, writes[i] = others[2](stored, level, full, unit, change, counted)
              if not level then
                return false
              end
            elseif change > 0 then
              level = level - change * unit
              writes[i] = packed('<dd', level, now)
            end
            if level < -LARGEST or level > full then
              return false
            end
            levels[i] = level
          elseif kind == 109 then
            starts[i] = counted
          elseif change ~= 0 and starts[i] == counted then
            local used = max(levels[i] + change, 0)
            if used > LARGEST then
              return false
            end
            levels[i], writes[i] = used, true
          end
        elseif kind == 115 then
          levels[i] = levels[i] - 1
        end
      end
      if mark ~= long + 1 or pcall('ZREM', index, id) ~= 1 then
        return false
      end
      call('SET', name, settled, 'PX', milliseconds(held_keep))
    end

    -- Write the counts, and answer with what is left.
    local out, written = length + 1, status ~= 10
    answer[out] = status
    if status == 16 and given == 0 then
      for i = 1, asks do
        answer[out + i] = held[i]
      end
      out = out + asks
    end
    place = 0
    for i = 1, count do
      local kind, at = kinds[i], 5 * i - 3
      local level, stored = levels[i], written and writes[i]
      place = place + (kind == 102 and 0 or 1)
      local key = KEYS[next_key + place - 1]
      if kind == 98 then
        if stored then
          local lacks = limits[at + 2] - level
          if lacks > 0 then
            call('SET', key, stored, 'PX', milliseconds(lacks / limits[at + 1]))
          else
            call('DEL', key)
          end
        end
        answer[out + 1], answer[out + 2] = level, now
        out = out + 2
      elseif kind == 99 then
        local start, before = starts[i], found[place - unread]
        if stored and level > 0 then
          if before and limits[at + 2] > 0 and unpacked('<d', before) == start then
            call('SETRANGE', key, 8, packed('<d', level)) -- it expires with its period, as it did
          else
            local until_then = limits[at + 2] > 0 and limits[at + 3] - moment + 86400000000 or 31536000000000
            call('SET', key, packed('<dd', start, level), 'PX', milliseconds(until_then))
          end
        elseif stored then
          call('DEL', key)
        end
        answer[out + 1], answer[out + 2] = start, level
        out = out + 2
      elseif kind == 109 then
        local field, start, cost = nil, starts[i], changes[i]
        field, texts = unpacked('<I2c0', numbers, texts)
        if written and cost ~= 0 and start > moment - 34560000000000 then -- 400 days
          local day = key -- of today
          if start ~= limits[at + 1] then
            day = string.match(day, '^(.*:)') .. string.format('%.0f', start)
          end
          if cost >= 100000000 or cost <= -100000000 then -- the server may write those with an exponent
            cost = string.format('%.0f', cost)
          end
          local used = pcall('HINCRBY', day, field, cost)
          if type(used) ~= 'table' and (used == tonumber(cost) or used <= 0) then
            others = others or { lean(3) }
            others[4](day, start, field, used, moment)
          end
        end
      elseif kind == 115 then
        local first, last = 0, 0
        if written and key ~= index then
          local brace = string.find(name, '}', 1, true)
          local member = string.sub(key, 1, brace) == string.sub(name, 1, brace) and string.sub(name, brace + 4) or name
          if is_hold then
            local forgotten = milliseconds(lease + keep)
            call('ZADD', key, now + lease, member)
            if level == 1 or call('PTTL', key) < forgotten then
              call('PEXPIRE', key, forgotten + min(forgotten, 60000))
            end
            local ended = now % 4 == 0 and call('ZCARD', key) - level or 0
            if ended > 0 then
              call('ZREMRANGEBYRANK', key, 0, min(ended, 60) - 1)
            end
          else
            call('ZREM', key, member)
          end
        end
        if level > 0 then
          last = tonumber(call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2])
          if status ~= 11 and level >= limits[at] then -- what has passed needs no wait
            local after = string.format('(%.0f', now)
            first = call('ZRANGEBYSCORE', key, after, '+inf', 'WITHSCORES', 'LIMIT', level - limits[at], 1)[2]
          end
        end
        answer[out + 1], answer[out + 2], answer[out + 3] = level, tonumber(first), last
        out = out + 3
      end
    end
    length = out
    return width
  end

end

-- What is seldom needed.

-- The headrooms of a bucket, see headroom.lua; nil if there are other numbers among them.
local function read(stored)
  local rooms = { unpacked('<' .. string.rep('d', (#stored - 16) / 8), stored, 17) }
  rooms[#rooms] = nil
  for i = 1, #rooms, 3 do
    if not (rooms[i] < 0 and rooms[i] >= -LARGEST and rooms[i + 1] >= 0 and rooms[i + 2] >= 0) then
      return nil
    end
  end
  return rooms
end

-- What is stored of a bucket with headrooms when there is one more hold, and its serial number; nil if it isn't simple.
local function with_hold(stored, room, level, left, base)
  local size = #stored
  if size < 616 and size > 40 and room > 0 and unpacked('<d', stored, size - 15) <= room then
    local last, _, lowest = unpacked('<ddd', stored, 17)
    last = 1 - last
    return packed('<ddddd', level, now, -last, 0, lowest) .. string.sub(stored, 41) .. packed('<ddd', -last, left, 1), last
  end
  local rooms, serial = read(stored), nil
  if not rooms then
    return nil
  end
  local list = headroom()
  list.see(rooms, room)
  rooms, serial = list.add(rooms, left, base)
  return packed('<dd', level, now) .. list.text(rooms), serial
end

-- What becomes of the level of a bucket when a hold ends whose cost changes, and what is stored then (false: the same).
local function without_hold(stored, level, full, unit, change, serial)
  local rooms, changed = read(stored), change ~= 0
  if not rooms then
    return nil
  end
  local list = headroom()
  if changed then
    list.see(rooms, min(full - level, LARGEST))
    level = level + (change < 0 and list.give_back(rooms, -change, unit, serial) or -change * unit)
  end
  changed = list.leave(rooms, serial) or changed
  return level, changed and packed('<dd', level, now) .. (level < full and list.text(rooms) or '')
end

-- Store a shape, if there is one, and drop a few that are no longer remembered from a long list of holds.
local function tidy(index, name, id, keep, digest, shape)
  if shape ~= '' then
    call('SET', string.sub(name, 1, (string.find(name, '}', 1, true))) .. 'p1:' .. digest, shape, 'PX', 1382400000)
  end
  if now % 4 > 0 then
    return
  end
  local ended = call('ZRANGEBYSCORE', index, '-inf', string.format('%.0f', now - keep), 'LIMIT', 0, 60)
  local prefix, gone = string.sub(name, 1, #name - #id), {}
  for i = 1, #ended do
    if call('EXISTS', prefix .. ended[i]) == 0 then
      gone[#gone + 1] = ended[i]
    end
  end
  if #gone > 0 then
    call('ZREM', index, unpack(gone))
  end
end

-- The first that is counted of a key on a day, or nothing any more: see meter.lua.
local function first_or_none(key, start, field, used, moment)
  if used <= 0 then
    call('HDEL', key, field)
    return
  end
  local place = string.find(key, '}', 1, true)
  local zone, meter, day = string.match(key, '^m1:([^:]*:)(.*):([^:]*)$', place + 1)
  local days, expiry = string.sub(key, 1, place) .. 'u1:' .. meter, milliseconds(start + 34560000000000 - moment)
  call('PEXPIRE', key, expiry)
  if type(pcall('ZADD', days, start, zone .. day)) ~= 'table' then
    call('ZREMRANGEBYSCORE', days, '-inf', string.format('%.0f', moment - 34560000000000))
    call('PEXPIRE', days, expiry)
  end
end

return with_hold, without_hold, tidy, first_or_none
