-- Write a change down and tell every node, in one step.
local number = redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], number)
return number
