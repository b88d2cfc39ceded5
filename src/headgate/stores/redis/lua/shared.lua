-- Shared by the parts of decide.lua.

local fmod = math.fmod

local function push(number)
  length = length + 1
  answer[length] = number
end

local function digits(number)
  return string.format('%.0f', number)
end
