-- Tokens that nodes have drawn ahead from a bucket. While a lease is out, its tokens count against the capacity: the
-- bucket refills up to its cap, which is so much lower. So level and leases together never exceed the capacity.

local LONGEST = 60000000 -- microseconds; what ends later was written before the clock stepped back

local function load(bucket, limit, stored, earn)
  local leases, kept = {}, {}
  for at = 17, #stored, 24 do
    local number, tokens, ends = unpacked('<ddd', stored, at)
    if not (are_whole(number, tokens) and are_whole(ends, tokens) and tokens > 0) then
      return false
    end
    leases[#leases + 1] = { number = number, tokens = tokens, ends = min(ends, now + LONGEST) }
    bucket.cap = bucket.cap - tokens * limit.unit
  end
  table.sort(leases, function(one, other) return one.ends < other.ends end)
  for _, lease in ipairs(leases) do
    if lease.ends <= now then -- it comes back as refill, from then on
      earn(bucket, limit, max(lease.ends, bucket.stamp))
      bucket.cap = bucket.cap + lease.tokens * limit.unit
    else
      kept[#kept + 1] = lease
    end
  end
  bucket.leases = kept
  return true
end

-- Take back the `old` lease of a node with what it hasn't used, then let it have `cost`, and on top of that up to `slice`
-- tokens as a `new` one, but not more than half of what is left. Return the tokens of the new lease, or nil if `cost`
-- doesn't pass.
local function draw(kind, bucket, limit, cost, slice, unused, old, new, span)
  local kept = {}
  for _, lease in ipairs(bucket.leases or kept) do
    if lease.number == old then
      bucket.cap = bucket.cap + lease.tokens * limit.unit
      kind.refund(bucket, limit, min(unused, lease.tokens))
    else
      kept[#kept + 1] = lease
    end
  end
  bucket.leases = kept
  local granted
  if kind.passes(bucket, limit, cost) then
    kind.spend(bucket, limit, cost)
    granted = max(min(slice, floor(floor(bucket.level / limit.unit) / 2)), 0)
    if granted > 0 then
      kind.spend(bucket, limit, granted)
      kept[#kept + 1] = { number = new, tokens = granted, ends = now + span }
    end
  end
  kind.save(bucket, limit)
  return granted
end

return { load = load, draw = draw }
