-- Tokens that nodes have drawn ahead from a bucket. Until they expire they count against the capacity: the bucket refills
-- up to its cap, which is so much lower. So its level and all drawn tokens together never exceed the capacity.

local LONGEST = 60000000 -- microseconds; what expires later was written before the clock stepped back

-- A bucket's cap becomes higher: its headroom is least right before.
local function raise(bucket, limit, tokens, moment)
  if bucket.rooms then
    headroom().see_bucket(bucket, limit, moment)
  end
  bucket.cap = bucket.cap + tokens * limit.unit
end

local function load(bucket, limit, drawn, earn)
  local kept = {}
  for _, slice in ipairs(drawn) do
    if slice.tokens <= 0 then
      return false
    end
    slice.expires = min(slice.expires, now + LONGEST)
    bucket.cap = bucket.cap - slice.tokens * limit.unit
  end
  table.sort(drawn, function(one, other) return one.expires < other.expires end)
  for _, slice in ipairs(drawn) do
    if slice.expires <= now then -- it comes back as refill, from then on
      local moment = max(slice.expires, bucket.stamp)
      earn(bucket, limit, moment)
      raise(bucket, limit, slice.tokens, moment)
    else
      kept[#kept + 1] = slice
    end
  end
  bucket.drawn = kept
  return true
end

-- Take back the unused tokens of a node's `old` slice, then let it have `cost`, and on top of that up to `most` tokens as
-- a `new` slice, but not more than half of the rest. Return the tokens of the new slice, or nil if `cost`
-- doesn't pass.
local function draw(kind, bucket, limit, cost, most, unused, old, new, span)
  local kept = {}
  for _, slice in ipairs(bucket.drawn or kept) do
    if slice.number == old then
      raise(bucket, limit, slice.tokens, now)
      kind.refund(bucket, limit, min(unused, slice.tokens))
    else
      kept[#kept + 1] = slice
    end
  end
  bucket.drawn = kept
  local granted
  if kind.passes(bucket, limit, cost) then
    kind.spend(bucket, limit, cost)
    granted = max(min(most, floor(floor(bucket.level / limit.unit) / 2)), 0)
    if granted > 0 then
      kind.spend(bucket, limit, granted)
      kept[#kept + 1] = { number = new, tokens = granted, expires = now + span }
    end
  end
  kind.save(bucket, limit)
  return granted
end

return { load = load, draw = draw }
